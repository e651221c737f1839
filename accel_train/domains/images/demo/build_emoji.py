"""Build emoji.webp and emoji.tsv: python build_emoji.py UNPACKED_NPM_PACKAGE (see ORIGIN.md). Needs Pillow."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COLUMNS = 64
SIDE = 64
QUALITY = 92
TONES = {
    "1F3FB": "light skin tone",
    "1F3FC": "medium light skin tone",
    "1F3FD": "medium skin tone",
    "1F3FE": "medium dark skin tone",
    "1F3FF": "dark skin tone",
}


def words(text: str) -> str:
    """Lower-case words with single spaces, without tabs and colons."""
    return " ".join(re.sub(r"[:_\t-]+", " ", text.lower()).split())


def rows(emoji: list[dict[str, Any]]) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield (file, name, skin tone, group, kind) in Unicode's order. Couples of two skin tones are left out."""
    for entry in sorted(emoji, key=lambda entry: entry["sort_order"]):
        name = words(entry["name"] or entry["short_name"])
        group = words(entry["category"])
        kind = words(entry["subcategory"])
        yield entry["image"], name, "", group, kind
        for tone, varied in entry.get("skin_variations", {}).items():
            tones = set(tone.split("-"))
            if len(tones) == 1:
                yield varied["image"], name, TONES[tones.pop()], group, kind


def main(package: Path) -> None:
    """Write both files beside this one."""
    from PIL import Image

    emoji = json.loads((package / "emoji.json").read_text("utf-8"))
    found = list(rows(emoji))
    height = -(-len(found) // COLUMNS) * SIDE
    sheet = Image.new("RGB", (COLUMNS * SIDE, height), "white")
    lines: list[str] = []
    for number, (file, *described) in enumerate(found):
        with Image.open(package / "img" / "google" / "64" / file) as picture:
            place = (number % COLUMNS * SIDE, number // COLUMNS * SIDE)
            transparent = picture.convert("RGBA")
            sheet.paste(transparent, place, transparent)
        lines.append("\t".join(described) + "\n")
    here = Path(__file__).parent
    sheet.save(here / "emoji.webp", quality=QUALITY, method=6)
    (here / "emoji.tsv").write_text("".join(lines), "utf-8")
    print(f"{len(found)} emoji, {(here / 'emoji.webp').stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
