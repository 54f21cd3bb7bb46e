from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

#: Packages of data, whose folders lie at the top of the repository, where people look for them.
DOCS = "elastic_ckpt.docs"
FOLDERS = {"elastic_ckpt.configs.rules": "configs/rules", DOCS: "docs"}


class BuildWithPages(build_py):
    """Takes the pages of the documentation, and leaves out the scripts beside them that make the site."""

    def find_package_modules(self, package, package_dir):
        return [] if package == DOCS else super().find_package_modules(package, package_dir)


setup(
    packages=[*find_packages(include=["elastic_ckpt", "elastic_ckpt.*"]), *FOLDERS],
    package_dir=FOLDERS,
    cmdclass={"build_py": BuildWithPages},
)
