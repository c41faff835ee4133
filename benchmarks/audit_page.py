"""The audit page with 100 000 suspicious samples against one with 1 000: size, time to open, to page and to decide.

Findings are made up, in 500 classes with three neighbours each; pictures are the supermarket photographs of photos.py at 128 px, again
and again, as thumbnails in files beside the page. Both pages are opened and used by keys in turns, in one headless chromium.

    python benchmarks/audit_page.py        needs chromium, and 600 MB for thumbnails while it runs
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path[1:1] = [str(TESTS)]

from audit_samples import made_up  # noqa: E402
from browser import Browser  # noqa: E402
from photos import photographs  # noqa: E402
from PIL import Image  # noqa: E402
from record import ratios, summary, write  # noqa: E402

from pipeline.reports.audit.page import write_page  # noqa: E402

MANY, FEW, TURNS, PAGE = 100_000, 1_000, 5, 48
CLASSES = [f"class {k}" for k in range(500)]
STEPS = ("open", "next page", "decide", "filter", "decide with all decided")


def small(picture: bytes) -> bytes:
    image, file = Image.open(io.BytesIO(picture)).convert("RGB"), io.BytesIO()
    image.thumbnail((128, 128))
    image.save(file, "jpeg")
    return file.getvalue()


def make(cards: int, pictures: list[bytes], folder: Path) -> dict[str, Any]:
    folder.mkdir()
    findings, split = made_up(cards + 1000, CLASSES, suspicious=cards)
    split._pictures = pictures
    started = time.perf_counter()
    write_page(findings, split, "run", folder / "audit.html", 12, inline=0)  # type: ignore[arg-type]
    seconds = time.perf_counter() - started
    files = list((folder / "audit_pictures").iterdir())
    return {
        "page_MB": round((folder / "audit.html").stat().st_size / 1e6, 2),
        "thumbnails": len(files),
        "thumbnail_KB": round(sum(file.stat().st_size for file in files) / len(files) / 1e3, 2),
        "write_seconds": round(seconds, 1),
    }


def use(browser: Browser, page: Path) -> dict[str, float]:
    """Seconds, until the browser has drawn."""
    browser.open(page.with_name("empty.html"))
    found: dict[str, float] = {}

    def timed(name: str, act: Any) -> None:
        started = time.perf_counter()
        act()
        browser.run("new Promise(done => requestAnimationFrame(() => setTimeout(done)))")
        found[name] = time.perf_counter() - started

    timed("open", lambda: browser.open(page))
    assert browser.run("document.querySelectorAll('.card').length") == PAGE
    browser.press(*["ArrowRight"] * (PAGE - 1))
    timed("next page", lambda: browser.press("ArrowRight"))
    assert browser.text("#page").startswith("page 2 of")
    timed("decide", lambda: browser.press("d"))
    assert browser.text("#progress").startswith("1 of")
    timed("filter", lambda: browser.run("(() => { by('given').value = '7'; by('given').onchange(); })()"))
    assert browser.text("#shown").split()[0] == str(browser.run("D.given.filter(k => k === 7).length"))
    browser.run("for (const index of D.index) decided.set(index, ['keep', 0])")
    timed("decide with all decided", lambda: browser.press("d"))
    assert browser.run("stored"), "the browser has not kept so many decisions"
    browser.run("localStorage.clear()")
    assert browser.problems == []
    return found


def main() -> None:
    pictures = [small(picture) for picture in photographs()[0]]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        places = {"many": folder / "many", "few": folder / "few"}
        made = {arm: make(n, pictures, places[arm]) for arm, n in (("many", MANY), ("few", FEW))}
        for place in places.values():
            (place / "empty.html").write_text("<title>empty</title>")
        times: dict[str, list[dict[str, float]]] = {"many": [], "few": []}
        with Browser(folder / "profile", folder / "downloads") as browser:
            for _ in range(TURNS):
                for arm, place in places.items():
                    times[arm].append(use(browser, place / "audit.html"))
    write(
        {
            "cards": {"many": MANY, "few": FEW},
            "pages": made,
            "seconds": {arm: {step: summary([one[step] for one in times[arm]]) for step in STEPS} for arm in times},
            "many_over_few": {
                step: ratios([one[step] for one in times["many"]], [one[step] for one in times["few"]])
                for step in STEPS
            },
        }
    )


if __name__ == "__main__":
    main()
