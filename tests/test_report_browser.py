"""The report in a real browser: headless Chromium, from a file, without a network."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from browsing import DESK, PHONE, asked, visit

from come.bench.report import write_html

sys.path.append(str(Path(__file__).parent / "harness"))
from made_up import PAIRS, grid

IMAGE, SCRIPT = '<img src=x onerror="window.hit=1">', '"</script><script>window.hit=1</script>'


def write_run(path, pairs, domains, **more):
    """A run of made-up cells, and its page."""
    folder = grid(path, pairs, domains, **more)
    write_html(folder, folder.records(), path / "report.html", ["come", "bench", *more.values()])
    return path / "report.html"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    domains = [f"corruption{i}" for i in range(4)] + [f"a_name_that_is_rather_long_{i}" for i in range(4)]
    return write_run(tmp_path_factory.mktemp("page"), PAIRS, domains)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    pairs = [(IMAGE, "em"), (IMAGE, "come"), (SCRIPT, "em"), (SCRIPT, "come")]
    return write_run(tmp_path_factory.mktemp("hostile"), pairs, [SCRIPT, IMAGE], model=IMAGE, data=SCRIPT)


def load(browser, path, width=DESK, theme="light"):
    visit(browser, path.as_uri(), width, theme)


def find(browser, selector):
    return browser.find_elements("css selector", selector)


def column(browser, table, number):
    """The numbers of a column, of the rows that are shown, from top to bottom."""
    return browser.execute_script(
        """return [...document.querySelectorAll(arguments[0] + " tbody tr")].filter((row) => !row.hidden)
           .map((row) => Number(row.cells[arguments[1]].dataset.value))""",
        table, number,
    )  # fmt: skip


def names(browser, table):
    return [row.text for row in find(browser, f"{table} tbody th") if row.is_displayed()]


def test_nothing_is_loaded_and_nothing_is_wrong(browser, page):
    load(browser, page)
    assert browser.get_log("browser") == []
    assert asked(browser) == [page.as_uri()]


def test_the_policy_forbids_the_network(browser, page):
    load(browser, page)
    script = """const done = arguments[0];
        fetch("https://example.com/").then(() => done("went out"), (error) => done(error.name))"""
    assert browser.execute_async_script(script) == "TypeError"
    assert "Content Security Policy" in browser.get_log("browser")[0]["message"]


@pytest.mark.parametrize("key", [None, "\ue007", " "], ids=["click", "enter", "space"])
def test_tables_are_sorted_by_mouse_and_keyboard(browser, page, key):
    load(browser, page)
    before = names(browser, "#accuracy")
    assert before == ["source", "by belief", "tent + em", "tent + come", "Improve", "sar + em", "sar + come", "Improve"]
    head = find(browser, "#accuracy thead th[aria-sort]")[0]
    button = head.find_element("css selector", "button")

    def press():
        button.click() if key is None else button.send_keys(key)

    press()
    assert head.get_attribute("aria-sort") == "descending"
    values = column(browser, "#accuracy", 1)
    assert values == sorted(values, reverse=True)
    assert not {"Improve", "by belief"} & set(names(browser, "#accuracy"))
    press()
    assert head.get_attribute("aria-sort") == "ascending"
    assert column(browser, "#accuracy", 1) == sorted(values)
    press()
    assert head.get_attribute("aria-sort") == "none"
    assert names(browser, "#accuracy") == before


def test_lower_is_first_where_lower_is_better_and_one_column_sorts_at_a_time(browser, page):
    load(browser, page)
    first, second = find(browser, "#fpr thead th[aria-sort]")[:2]
    first.find_element("css selector", "button").click()
    assert first.get_attribute("aria-sort") == "ascending"
    second.find_element("css selector", "button").click()
    assert (first.get_attribute("aria-sort"), second.get_attribute("aria-sort")) == ("none", "ascending")
    found = column(browser, "#fpr .scroll:first-of-type", 2)  # the one as published
    assert found == sorted(found)


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_plots_are_there_and_can_be_read(browser, page, width):
    load(browser, page, width)
    shown = [plot for plot in find(browser, ".plot") if plot.is_displayed()]
    assert len(shown) == 7 + 5 + 2 + 2  # one stream, five of confidence, two timelines, two of cost
    for plot in shown:
        assert plot.size["width"] > 200
        assert plot.size["height"] > 100
        assert plot.get_attribute("alt")
    drawn = browser.execute_script("return [...document.images].map((i) => [i.complete, i.naturalWidth, i.width])")
    assert all(complete and natural > 0 for complete, natural, _ in drawn)
    # the smallest text is of 10 pixels
    assert min(width / natural for _, natural, width in drawn if width) > 0.8


def test_a_stream_is_chosen(browser, page):
    from selenium.webdriver.support.select import Select

    load(browser, page)
    chooser = Select(browser.find_element("id", "stream-chooser"))
    assert len(chooser.options) == 8
    chooser.select_by_visible_text("corruption3")
    (shown,) = [stream for stream in find(browser, ".stream") if stream.is_displayed()]
    assert shown.find_element("css selector", "h3").get_attribute("textContent") == "corruption3"
    assert all(plot.is_displayed() for plot in shown.find_elements("css selector", ".plot"))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_theme_follows_the_system_and_the_button(browser, page, theme):
    load(browser, page, theme=theme)

    def is_dark():
        """The page, with text that can be read; drawings are turned with it."""
        *colours, turned = browser.execute_script(
            """const style = (selector) => getComputedStyle(document.querySelector(selector));
               return [style("body").backgroundColor, style("body").color, style(".plot").filter]"""
        )
        paper, ink = (sum(map(int, colour[4:-1].split(", "))) for colour in colours)
        assert abs(paper - ink) > 400
        assert turned == ("invert(1) hue-rotate(180deg)" if paper < 200 else "none")
        return paper < 200

    assert is_dark() == (theme == "dark")
    button = browser.find_element("id", "theme")
    assert button.text == ("Light" if theme == "dark" else "Dark")
    button.click()
    assert is_dark() == (theme != "dark")
    button.click()
    assert is_dark() == (theme == "dark")


@pytest.mark.parametrize("width", [320, PHONE, 768, DESK])
def test_the_page_does_not_scroll_sideways(browser, page, hostile, width):
    for path in (page, hostile):
        load(browser, path, width)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width


def test_tables_scroll_in_their_box_and_keep_their_first_column(browser, page):
    load(browser, page, PHONE)
    moved, left = browser.execute_script(
        """const box = document.querySelector("#accuracy .scroll");
           box.scrollLeft = 200;
           const left = (element) => element.getBoundingClientRect().left;
           return [box.scrollLeft, left(box.querySelector("tbody th")) - left(box)]"""
    )
    assert moved == 200
    assert left == 0


def test_hostile_names_are_shown_and_run_nothing(browser, hostile):
    load(browser, hostile)
    assert browser.execute_script("return window.hit") is None
    assert browser.get_log("browser") == []
    assert all(image.get_attribute("src").startswith("data:image/svg+xml;base64,") for image in find(browser, "img"))
    assert browser.find_element("css selector", "h1").text == f"{IMAGE} on {SCRIPT}"
    assert f"{IMAGE} + come" in names(browser, "#accuracy")
    assert all(browser.execute_script("return [...document.images].map((image) => image.naturalWidth > 0)"))
    legend = [item.text for item in find(browser, "#stream .legend li")]
    assert set(legend) == {f"{n[:23]}… + {o}" for n in (IMAGE, SCRIPT) for o in ("em", "come")}


def test_a_long_name_leaves_room_for_the_numbers(browser, tmp_path):
    path = write_run(tmp_path / "run", [("m" * 900, "em"), ("m" * 900, "come")], ["fog"])
    for width in (PHONE, DESK):
        load(browser, path, width)
        assert find(browser, "#accuracy tbody th")[0].size["width"] < width / 2


def test_it_prints_on_white(browser, page):
    load(browser, page, theme="dark")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.execute_script("return getComputedStyle(document.querySelector('.plot')).filter") == "none"
    assert not browser.find_element("id", "theme").is_displayed()
    assert len(browser.execute_cdp_cmd("Page.printToPDF", {})["data"]) > 10_000
