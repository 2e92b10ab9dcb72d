"""The report in a real browser: headless Chromium, from a file, without a network."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from browsing import DESK, PHONE, asked, visit

from come.bench.board.page import write_board
from come.bench.board.ranking import read_board
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
    domains = [f"corruption{i}" for i in range(3)] + [f"a_name_that_is_rather_long_{i}" for i in range(2)]
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
    shown = browser.execute_script(
        """return [...document.querySelectorAll(".plot:not(.swatch .plot)")].map((plot) => {
             const box = plot.getBoundingClientRect();
             return [box.width, box.height, box.width / plot.viewBox.baseVal.width, plot.getAttribute("aria-label")];
           }).filter(([width]) => width)"""
    )
    # the whole stream, one stream, five of confidence, two of reliability, two timelines, two of cost
    assert len(shown) == 1 + 7 + 5 + 2 + 2 + 2
    for across, height, scale, label in shown:
        assert across > 200
        assert height > 100
        assert scale * 8.5 > 7.9  # pixels of a text
        assert label


@pytest.mark.parametrize("width", [768, DESK])
def test_no_panel_is_alone_in_a_row_but_over_the_whole_width(browser, page, width):
    load(browser, page, width)
    found = browser.execute_script(
        """return [...document.querySelectorAll(".panels")].map((panels) => [panels.clientWidth, [...panels.children]
             .map((panel) => panel.getBoundingClientRect()).map((box) => [Math.round(box.top), box.width])])"""
    )
    for whole, boxes in found:
        rows = {top: [width for other, width in boxes if other == top] for top, _ in boxes}
        assert all(len(row) > 1 or row[0] >= whole - 1 for row in rows.values()), rows


def pointed(browser, plot):
    """Put the pointer on the middle of a plot, and return what the tip says."""
    from selenium.webdriver import ActionChains

    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plot)
    ActionChains(browser).move_to_element(plot).perform()
    (tip,) = find(browser, "#tip")
    return tip.text if tip.is_displayed() else ""


def drawn(browser, series, where):
    """Whether something of a series can be seen there."""
    return any(group.is_displayed() for group in find(browser, f'{where} .plot [data-series="{series}"] > path'))


@pytest.mark.parametrize("width", [DESK, PHONE])
def test_the_finding_and_the_chart_are_above_the_fold(browser, page, width):
    load(browser, page, width)
    chart, lead = find(browser, "#finding .plot")[0].rect, find(browser, "#finding .lead")[0].rect
    assert lead["y"] < 450
    if width == DESK:
        assert chart["y"] + chart["height"] < 800
        assert chart["x"] > lead["x"] + lead["width"]
    else:
        assert chart["y"] < 800


def test_a_pointer_shows_values(browser, page):
    load(browser, page)
    plot = find(browser, "#stream .stream:not([hidden]) .plot")[0]
    head, *values = pointed(browser, plot).splitlines()
    assert head.endswith("samples seen")
    named = dict(zip(values[::2], map(float, values[1::2]), strict=True))
    assert named.keys() == {"source", "tent + em", "tent + come", "sar + em", "sar + come"}
    assert list(named.values()) == sorted(named.values(), reverse=True)
    assert all(30 < value < 90 for value in named.values())
    assert find(browser, ".guide")
    pointed(browser, find(browser, "h1")[0])
    assert not find(browser, ".guide")
    whole = pointed(browser, find(browser, "#finding .plot")[0]).splitlines()
    assert whole[0].startswith(("corruption", "a_name_that_is_rather_long_"))
    assert whole[whole.index("source") + 1] == "0"


def test_a_legend_switches_series_of_its_section(browser, page):
    load(browser, page)
    button = next(b for b in find(browser, "#stream .legend button") if b.text == "tent + come")
    series = button.get_attribute("data-series")
    assert drawn(browser, series, "#stream")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert not drawn(browser, series, "#stream")
    plot = find(browser, "#stream .stream:not([hidden]) .plot")[0]
    assert "tent + come" not in pointed(browser, plot)
    button.send_keys(" ")
    assert drawn(browser, series, "#stream")
    assert "tent + come" in pointed(browser, plot)
    assert browser.get_log("browser") == []


def test_the_chart_begins_with_the_largest_effect(browser, page):
    load(browser, page)
    buttons = find(browser, "#finding .legend [data-series]")
    on = [b.text for b in buttons if b.get_attribute("aria-pressed") == "true"]
    both = [name for method in ("tent", "sar") for name in (f"{method} + em", f"{method} + come") if name in on]
    assert on[0] == "source"
    assert sorted(on[1:]) == sorted(both) != []  # of the method that gains most, and of that which COME changes most
    for button in buttons:
        assert drawn(browser, button.get_attribute("data-series"), "#finding") == (button.text in on)
    for button in find(browser, "#finding .all"):
        button.click()
    assert all(drawn(browser, button.get_attribute("data-series"), "#finding") for button in buttons)


def test_without_a_script_everything_is_shown(browser, page):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        load(browser, page)
        assert not find(browser, ".off")
        assert len([stream for stream in find(browser, ".stream") if stream.is_displayed()]) == 5
        assert find(browser, ".plot title")  # what a pointer shows
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_a_stream_is_chosen(browser, page):
    from selenium.webdriver.support.select import Select

    load(browser, page)
    chooser = Select(browser.find_element("id", "stream-chooser"))
    assert len(chooser.options) == 5
    chooser.select_by_visible_text("corruption2")
    (shown,) = [stream for stream in find(browser, ".stream") if stream.is_displayed()]
    assert shown.find_element("css selector", "h3").get_attribute("textContent") == "corruption2"
    assert all(plot.is_displayed() for plot in shown.find_elements("css selector", ".plot"))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_theme_follows_the_system_and_the_button(browser, page, theme):
    load(browser, page, theme=theme)

    def is_dark():
        """The page, with text and lines that can be read."""
        colours = browser.execute_script(
            """const style = (selector) => getComputedStyle(document.querySelector(selector));
               return [style("body").backgroundColor, style("body").color, style(".plot text").fill,
                       style('#finding .plot [data-series="s1"] > path').stroke]"""
        )
        paper, *inks = (sum(map(int, colour[4:-1].split(", "))) for colour in colours)
        assert abs(paper - inks[0]) > 400
        assert all(abs(paper - ink) > 250 for ink in inks)
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


def test_that_a_table_goes_on_can_be_seen(browser, page):
    """On a phone the averages are in sight, and the edge fades until the table has come to its end."""
    load(browser, page, PHONE)
    script = """const box = document.querySelector("#accuracy .scroll"), right = (e) => e.getBoundingClientRect().right;
        box.scrollLeft = arguments[0];
        const fade = box.querySelector(".fade").getBoundingClientRect();
        return [right(box.querySelector("table")) - fade.left, right(box) - fade.right,
                [...box.querySelectorAll("thead th")].filter((th) => right(th) <= fade.left).map((th) => th.innerText)]"""
    covered, at_edge, heads = browser.execute_script(script, 0)
    assert covered > 0
    assert abs(at_edge) < 1
    assert [" ".join(head.split()) for head in heads] == ["Method", "Acc↑", "Gain↑", "FPR↓"]
    covered, *_ = browser.execute_script(script, 10_000)
    assert covered <= 0.5
    assert browser.execute_script("return document.documentElement.scrollWidth") <= PHONE


def test_hostile_names_are_shown_and_run_nothing(browser, hostile):
    load(browser, hostile)
    assert browser.execute_script("return window.hit") is None
    assert browser.get_log("browser") == []
    assert not find(browser, "img")
    assert browser.find_element("css selector", "h1").text == f"{IMAGE} on {SCRIPT}"
    assert f"{IMAGE} + come" in names(browser, "#accuracy")
    legend = [item.text for item in find(browser, "#stream .legend li")]
    assert set(legend) == {f"{n[:23]}… + {o}" for n in (IMAGE, SCRIPT) for o in ("em", "come")}
    plot = find(browser, "#stream .stream:not([hidden]) .plot")[0]
    assert f"{IMAGE[:23]}… + come" in pointed(browser, plot)
    assert pointed(browser, find(browser, "#finding .plot")[0]).splitlines()[0] in (IMAGE, SCRIPT)
    assert browser.execute_script("return window.hit") is None


def test_a_long_name_leaves_room_for_the_numbers(browser, tmp_path):
    path = write_run(tmp_path / "run", [("m" * 900, "em"), ("m" * 900, "come")], ["fog"])
    for width in (PHONE, DESK):
        load(browser, path, width)
        assert find(browser, "#accuracy tbody th")[0].size["width"] < width / 2


def test_it_prints_on_white(browser, page):
    load(browser, page, theme="dark")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.execute_script("return getComputedStyle(document.querySelector('.plot image')).filter") == "none"
    assert not browser.find_element("id", "theme").is_displayed()
    assert len(browser.execute_cdp_cmd("Page.printToPDF", {})["data"]) > 10_000


# ---- the leaderboard ----


@pytest.fixture(scope="module")
def leaderboard(tmp_path_factory):
    path = tmp_path_factory.mktemp("board") / "report.html"
    write_board(read_board(Path(__file__).parents[1] / "results"), path)
    return path


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [DESK, PHONE])
def test_a_leaderboard_fits_the_window(browser, leaderboard, width, theme):
    load(browser, leaderboard, width, theme)
    assert browser.get_log("browser") == []
    assert asked(browser) == [leaderboard.as_uri()]
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    shown = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (shown == "rgb(255, 255, 255)") == (theme == "light")


def test_a_leaderboard_is_sorted_and_keeps_its_source(browser, leaderboard):
    load(browser, leaderboard)
    gains = column(browser, "#p1", 1)
    assert gains == sorted(gains, reverse=True)
    find(browser, "#p1 thead button")[2].click()
    rates = column(browser, "#p1", 3)
    assert rates == sorted(rates)
    assert "source" in names(browser, "#p1")
