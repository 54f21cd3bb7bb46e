from setuptools import find_packages, setup

READY_CONFIGS = {f"elastic_ckpt.configs.{kind}": f"configs/{kind}" for kind in ("rules", "scale")}
setup(packages=[*find_packages(include=["elastic_ckpt", "elastic_ckpt.*"]), *READY_CONFIGS], package_dir=READY_CONFIGS)
