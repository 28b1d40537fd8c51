"""The server's page in Chromium: how soon it is painted, what the console says, and what axe-core finds.

    python benchmarks/page.py --axe AXE.MIN.JS [--rounds 5]

The kit model is served on loopback. In each round the page is opened with nothing cached, and the browser tells when it
first painted something of it. axe-core, which looks for what keeps people from using a page, then looks at it as it is
opened, with a conversation, with the settings open and on a small screen, in light and dark; counted is what it finds
by impact. Chromium and chromedriver must be there.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from _box import ROOT, write_results

sys.path.insert(0, str(ROOT / "tests"))

from browser_page import BROWSER, DRIVER, HEIGHT, WIDTH, Page, chromium
from kit_models import KIT
from served import TEMPLATE, Served, served

MOST_PAINT_S = 0.5
SERIOUS = ("serious", "critical")
FIRST_PAINT = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
RUN_AXE = """
    const done = arguments[0];
    axe.run(document, { preload: false }).then(
        ({ passes, violations }) => done(
            [passes.length, violations.map(({ id, impact, nodes }) => [id, impact, nodes[0].html])]),
        (error) => done(String(error)));
"""


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--axe", type=Path, required=True, help="axe.min.js of the package axe-core")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if not (BROWSER and DRIVER):
        raise SystemExit("no chromium, or no chromedriver")
    with (
        served(KIT, "-c", 512, "-t", 1, "-n", 24, "--chat-template", TEMPLATE) as server,
        tempfile.TemporaryDirectory() as folder,
        chromium(Path(folder)) as driver,
    ):
        page = Page(driver)
        paints = [painted_s(page, server) for _ in range(given.rounds)]
        found = violations(page, given.axe.read_text(encoding="utf-8"))
        errors = page.errors()
    rows = [{"what": "first paint, s", "value": value} for value in paints]
    rows += [{"what": f"axe-core: {impact}: {name}", "value": html} for name, impact, html in found]
    rows += [{"what": "console", "value": error} for error in errors]
    write_results("page", rows, f"{__doc__}\n{describe(paints, found, errors)}")


def painted_s(page: Page, server: Served) -> float:
    """Return how many seconds after the page was asked for something of it was seen."""
    page.driver.execute_cdp_cmd("Network.clearBrowserCache", {})
    page.open(server)
    page.until("performance.getEntriesByName('first-contentful-paint').length")
    return float(page.js(FIRST_PAINT)) / 1000


def violations(page: Page, axe: str) -> list[tuple[str, str, str]]:
    """Return what axe-core finds: the rule, its impact, and the first place."""
    page.sees("#model", KIT.stem)
    found = set(looked_at(page, axe))
    page.say("Tell me of the fox.")
    page.finished()
    for width, scheme in ((WIDTH, "light"), (WIDTH, "dark"), (390, "light"), (390, "dark")):
        page.look(width, HEIGHT, scheme)
        found |= set(looked_at(page, axe))
    page.look(WIDTH, HEIGHT)
    page.js("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    return sorted(found | set(looked_at(page, axe)))


def looked_at(page: Page, axe: str) -> list[tuple[str, str, str]]:
    """Return what axe-core finds on the page as it is now."""
    page.js(axe)
    found: Any = page.driver.execute_async_script(RUN_AXE)
    if isinstance(found, str) or not found[0]:
        raise SystemExit(f"axe-core: {found}")
    return [(name, impact, html[:200]) for name, impact, html in found[1]]


def describe(paints: list[float], found: list[tuple[str, str, str]], errors: list[str]) -> str:
    """Return the outcome for a reader."""
    impacts = collections.Counter(impact for _, impact, _ in found)
    serious = sum(impacts[impact] for impact in SERIOUS)
    by_impact = ", ".join(f"{number} {impact}" for impact, number in sorted(impacts.items())) or "nothing"
    return (
        f"First paint after {1000 * statistics.median(paints):.0f} ms ({1000 * min(paints):.0f} to "
        f"{1000 * max(paints):.0f} in {len(paints)} rounds; reach {1000 * MOST_PAINT_S:.0f}); {len(errors)} errors in "
        f"the console (reach 0); axe-core: {by_impact}; serious or critical: {serious} (reach 0)."
    )


if __name__ == "__main__":
    main()
