"""`python -m shards.inspect URL`: a card in the terminal and a contact sheet with given and true labels."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from pydantic import Field
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shards.base import cli
from shards.base.errors import UserError
from shards.base.progress import Progress
from shards.base.redact import redact
from shards.base.settings import Settings
from shards.bias import counts_of
from shards.config import CacheConfig
from shards.findings import count_findings, find_in_pictures
from shards.names import injected, name_of_shards, tail_in_words
from shards.picture import to_rgb
from shards.reader import Split, open_split, read_manifest
from shards.verify import files

ABOUT = "Show what is in finished shards, and draw a contact sheet of pictures with given and true labels."
RIGHT, WRONG, UNKNOWN = (38, 132, 76), (196, 48, 43), (140, 140, 140)
LOOK_UP_TO = 20_000  # pictures that are looked through unasked
TILE, CAPTION, GAP, LEFT = 88, 18, 10, 190


class InspectConfig(Settings):
    url: str = Field(min_length=1, description="the shards: a folder or URL")
    split: str = Field(default="train", description="the split on the contact sheet")
    sheet: str = Field(
        default="contact_sheet.png",
        description="the contact sheet, in the current folder unless a path is given; empty: none",
    )
    rows: int = Field(default=12, ge=1, le=100, description="classes on the contact sheet, from large to small")
    columns: int = Field(default=10, ge=1, le=50, description="pictures of each class")
    seed: int = Field(default=0, ge=0, description="chooses the pictures")
    pictures: bool | None = Field(
        default=None,
        description=f"look for copies, test pictures in train and faults, in one pass over all pictures; none: if the "
        f"shards are local and have at most {LOOK_UP_TO:,} pictures",
    )
    cache: CacheConfig = Field(default_factory=CacheConfig, description="copies of remote shards")


COMMAND = cli.Command("python -m shards.inspect", ABOUT, InspectConfig, words=("url",))


def show(url: str, split: Split, console: Console) -> None:
    """Print a card: source, sizes, bias, and a table of classes."""
    about = read_manifest(url)
    bias = about.bias
    size = sum(file.bytes for file in files(about))
    samples = ", ".join(f"{info.samples:,} {name}" for name, info in about.splits.items())
    tail = tail_in_words(bias)
    noise = "no noise injected"
    if bias.noise_kind != "none":
        changed = f"{bias.flipped:,} labels changed ({bias.realised_noise:.1%})"
        noise = f"{bias.noise_kind} noise {bias.noise:g}: {changed}"
    groups = ", ".join(f"{len(classes)} {name}" for name, classes in about.groups.items())
    reasons = ", ".join(f"{count} {reason}" for reason, count in about.rejected.reasons.items())
    lines = [
        f"[bold]{escape(name_of_shards(url, about))}[/]: {samples} samples, {len(about.classes)} classes ({groups})",
        f"{tail}, {noise}" + (f", bias seed {bias.seed}" if injected(bias) else ""),
        f"{len(list(files(about)))} files, {size / 1e6:,.1f} MB; manifest {about.hash[:12]}",
        f"rejected: {about.rejected.count}" + (f" ({escape(reasons)})" if reasons else ""),
    ]
    console.print(Panel("\n".join(lines), title=escape(redact(url)), expand=False))
    console.print(_classes(split, {name: info.given_counts for name, info in about.splits.items()}))


def _classes(split: Split, counts: dict[str, list[int]]) -> Table:
    classes = len(split.classes)
    known = split.true >= 0
    wrong = counts_of(split.given[known & (split.given != split.true)], classes)
    known_counts = counts_of(split.given[known], classes)
    available = split.manifest.bias.available_counts
    table = Table(title=f"classes ({split.name})", title_justify="left", box=box.SIMPLE)
    table.add_column("class")  # shortened on a narrow terminal
    others = [name for name in counts if name != split.name]
    for column in ("source", "before\nnoise", "given", "wrong", "", *others):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    most = max(1, *split.info.given_counts)
    shown = _spread(split.clean_counts, 40)
    for k in shown:
        given = split.info.given_counts[k]
        share = f"{wrong[k] / known_counts[k]:.0%}" if known_counts[k] else "?"
        bar = ("█" * max(1, round(12 * given / most)) if given else "").ljust(12)
        cells = [
            str(available[k]) if split.name == "train" else "",
            str(split.clean_counts[k]),
            str(given),
            share,
            bar,
        ]
        name = Text(" ".join(split.classes[k].split()), no_wrap=True, overflow="ellipsis")
        table.add_row(name, *cells, *(str(counts[name][k]) for name in others))
    if len(shown) < classes:
        table.caption = f"{len(shown)} of {classes} classes, from large to small"
    return table


def look(splits: dict[str, Split], console: Console) -> None:
    """Read every picture and print how many copies, leaks and faults there are."""
    total = sum(map(len, splits.values()))
    console.print(f"Looking at {total:,} pictures for copies and faults (pictures=false leaves it out).")
    with Progress(total, "pictures", console.print, bar=True) as progress:
        findings = find_in_pictures(splits, progress.step)
    table = Table(title="pictures", title_justify="left", box=box.SIMPLE)
    table.add_column("what")
    for name in findings.splits:
        table.add_column(name, justify="right")
    for what, counts in count_findings(findings).items():
        table.add_row(what, *(str(counts[name]) for name in findings.splits))
    console.print(table)
    for name, found in findings.leaks.items():
        if len(found):
            sample, train = found[0].tolist()
            console.print(
                f"{len(np.unique(found[:, 0]))} pictures of '{name}' are in train too, for example {name} {sample} = train "
                f"{train} ({escape(splits[name].keys([sample])[0])}, {escape(splits['train'].keys([train])[0])}). "
                "Results on them say too much: remove them from train, and build again."
            )


def _spread(counts: NDArray[np.int64], most: int) -> list[int]:
    """At most so many classes: all in their order, or evenly from the largest to the smallest."""
    if len(counts) <= most:
        return list(range(len(counts)))
    by_size = np.argsort(-counts, kind="stable")
    return [int(k) for k in by_size[np.linspace(0, len(counts) - 1, most).round().astype(int)]]


def contact_sheet(split: Split, rows: int, columns: int, seed: int) -> Image.Image:
    """One row for each class as labelled. Frames: green, the label is right; red, wrong; grey, unknown."""
    rng = np.random.default_rng(seed)
    classes = _spread(split.clean_counts, rows)
    title, small = ImageFont.load_default(15), ImageFont.load_default(12)
    width = LEFT + columns * (TILE + GAP) + GAP
    sheet = Image.new("RGB", (width, 44 + len(classes) * (TILE + CAPTION + GAP) + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    legend = "rows: the given label; below each picture: the true one"
    draw.text((GAP, 12), f"{split.manifest.source}, {split.name}. {legend}", "black", title)
    for row, k in enumerate(classes):
        top = 44 + row * (TILE + CAPTION + GAP)
        mine = np.flatnonzero(split.given == k)
        chosen = np.sort(rng.choice(mine, min(columns, len(mine)), replace=False))
        draw.text((GAP, top + 20), _fit(split.classes[k], title, LEFT - 2 * GAP), "black", title)
        draw.text((GAP, top + 42), f"{len(mine)} labelled so", UNKNOWN, small)
        known = split.true[mine] >= 0
        if known.any():
            wrong = float((split.true[mine][known] != k).mean())
            draw.text((GAP, top + 58), f"{wrong:.0%} of them wrong", UNKNOWN, small)
        for column, index in enumerate(chosen):
            left = LEFT + column * (TILE + GAP)
            true = int(split.true[index])
            colour = UNKNOWN if true < 0 else RIGHT if true == k else WRONG
            draw.rectangle((left - 3, top - 3, left + TILE + 2, top + TILE + 2), colour)
            sheet.paste(_tile(split.read_one(int(index))), (left, top))
            name = "?" if true < 0 else split.classes[true]
            draw.text((left, top + TILE + 4), _fit(name, small, TILE), colour, small)
    return sheet


def _tile(data: bytes) -> Image.Image:
    """The middle of the picture as a square; tiny pictures are enlarged by whole pixels."""
    image = to_rgb(Image.open(io.BytesIO(data)))
    side = min(image.size)
    left, top = (image.size[0] - side) // 2, (image.size[1] - side) // 2
    how = Image.Resampling.NEAREST if side < TILE else Image.Resampling.LANCZOS
    return image.crop((left, top, left + side, top + side)).resize((TILE, TILE), how)


def _fit(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    clean = " ".join(text.split())
    if font.getlength(clean) <= width:
        return clean
    while clean and font.getlength(clean + "…") > width:
        clean = clean[:-1]
    return clean + "…"


def main(argv: list[str]) -> int:
    config = COMMAND.load(argv)
    split = open_split(config.url, config.split, config.cache)
    show(config.url, split, Console())
    everything = {name: open_split(config.url, name, config.cache) for name in split.manifest.splits}
    few = split.store.root is not None and sum(map(len, everything.values())) <= LOOK_UP_TO
    if split.info.shards and (few if config.pictures is None else config.pictures):
        look(everything, Console())
    elif config.pictures:
        raise UserError("pictures=true needs tars, and there are FFCV files only. Build with format=both.")
    if config.sheet and not split.info.shards:
        print("No contact sheet: there are FFCV files only.")
    elif config.sheet:
        path = Path(config.sheet).expanduser().absolute()
        if path.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
            raise UserError(f"sheet={config.sheet}: give the contact sheet a name that ends in .png or .jpg.")
        sheet = contact_sheet(split, config.rows, config.columns, config.seed)
        try:
            sheet.save(path)
        except OSError as error:
            raise UserError(
                f"sheet={config.sheet} cannot be written ({error.strerror}). Choose another path."
            ) from None
        print(f"Contact sheet: {path}")
    return 0


def start() -> None:
    cli.run(main)


if __name__ == "__main__":
    start()
