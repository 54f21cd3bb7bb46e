from setuptools import find_packages, setup

PRESETS = {"elastic_ckpt.configs.rules": "configs/rules"}
setup(packages=[*find_packages(include=["elastic_ckpt", "elastic_ckpt.*"]), *PRESETS], package_dir=PRESETS)
