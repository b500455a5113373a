"""The report in a real browser, at a desk's width and a phone's."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import toy_measurements
import toy_profiles
from autotune.report.page import write_report
from autotune.texts import KeptText

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run"),
    *("disable-background-networking", "disable-component-update", "disable-sync"),
)

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs Debian's chromium and chromium-driver"
)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a report with long names, a wide table and hostile text."""
    path = tmp_path_factory.mktemp("report") / "toy.report.html"
    head = "some-organisation/" + "a-model-with-a-very-long-name-" * 4
    profile = toy_profiles.profile({"draft.id": head, "name": "<script>throw 1</script>"})
    text = KeptText("tune", "a.0", "<script>throw 2</script>", "<img src=x>" + "y" * 300, [], [])
    figures = toy_measurements.measurements(head)
    write_report(profile, figures, Path("toy.yaml"), path, [text])
    return path


@pytest.fixture
def browser(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Return a browser as wide as the test asks, with an empty profile of its own."""
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"user-data-dir={tmp_path}"):
        options.add_argument(f"--{flag}")
    metrics = {"width": request.param, "height": 844, "pixelRatio": 1.0}
    options.add_experimental_option("mobileEmulation", {"deviceMetrics": metrics})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.mark.parametrize("browser", [390, 1280], indirect=True)
def test_the_report_is_whole_and_quiet_in_a_browser(
    browser: Any, report: Path, request: pytest.FixtureRequest
) -> None:
    width = request.node.callspec.params["browser"]
    browser.get(report.as_uri())
    pictures = browser.execute_script(
        "return [...document.images].map(i => [i.complete, i.naturalWidth, i.clientWidth, i.alt])"
    )
    assert len(pictures) == 9
    for complete, natural_width, shown_width, alt in pictures:
        assert complete and natural_width > 0 and alt
        assert 300 < shown_width <= width
    page_width, headline_size = browser.execute_script(
        "const h = getComputedStyle(document.querySelector('h1')).fontSize;"
        "return [document.documentElement.scrollWidth, parseFloat(h)]"
    )
    assert page_width <= width, "the page scrolls sideways"
    assert headline_size >= 24
    assert browser.execute_script("return document.scripts.length") == 0
    assert browser.get_log("browser") == []
    loaded = browser.execute_script(
        "return performance.getEntriesByType('resource').map(entry => entry.name)"
    )
    assert all(name.startswith("data:") for name in loaded)
