"Reads settings.ini and supplies what pyproject.toml calls dynamic: each fact is written in one place."
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup

config = ConfigParser(delimiters=["="])
config.read(Path(__file__).parent / "settings.ini", encoding="utf-8")
c = config["DEFAULT"]
lib = c["lib_path"]

setup(
    description=c["description"],
    author=c["author"],
    keywords=c["keywords"].split(),
    classifiers=c["classifiers"].strip().splitlines(),
    packages=find_packages(include=[lib, f"{lib}.*"]),
    package_data={lib: ["py.typed", "*.js", "recipes/*", "models/*/*", "predictors/*"]},
    install_requires=c["requirements"].split(),
    extras_require={name: c[f"{name}_requirements"].split() for name in ("lab", "dev")},
    entry_points={"console_scripts": [f"{lib}={lib}.cli:main"], "nbdev": [f"{lib}={lib}._modidx:d"]},
)
