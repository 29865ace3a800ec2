"""Text of users is shown as text: in names, tags, metrics, settings, causes, logs, samples, findings."""

from browser.conftest import Visit
from browser.fake_run import SCRIPT, run_id
from browser.fake_service import FakeServer

EVIL = f"/runs/{run_id(3)}"


def test_on_every_page(visit: Visit, service: FakeServer) -> None:
    service.state.log_text += f"{SCRIPT}\n"
    service.state.job(45)["reason"] = f"waits {SCRIPT}"
    for path, within in (
        ("/?text=evil", "tbody"),
        ("/queue", "main"),
        ("/hosts", "main"),
        (EVIL, ".run-head"),
        (f"{EVIL}?tab=curves", ".charts"),
        (f"{EVIL}?tab=attempts", "#panel"),
        (f"{EVIL}?tab=config", "#panel"),
        (f"{EVIL}?tab=log", "#panel"),
        (f"/runs/{run_id(1)}?tab=samples", "#panel"),
        (f"/compare?runs={run_id(3)},{run_id(1)}", "main"),
    ):
        page = visit(path)
        page.sees(SCRIPT, within)
        assert not page.all("main img, main script, main iframe"), path
        assert not page.driver.title.startswith("hacked"), path


def test_an_error_and_a_question_too(visit: Visit, service: FakeServer) -> None:
    page = visit(EVIL)
    page.click("[data-action=tags]")
    assert page.one("dialog input[name=tags]").get_attribute("value") == "<b>tag</b>"
    assert SCRIPT in page.text("dialog h2")
    service.state.refuse = (409, f"no: {SCRIPT}")
    page.button("Set tags", "dialog").click()
    page.sees(SCRIPT, "#messages")
    service.state.refuse = None
    assert not page.all("#messages img, dialog img, b:not([class]) > img")


def test_tags_column_filter_and_choice_of_columns(visit: Visit) -> None:
    page = visit("/?text=evil")
    page.sees("<b>tag</b>", "tbody")
    page.click("#columns")
    page.sees("<script>alert(1)</script>", "dialog")
    page.button("Back", "dialog").click()


def test_no_file_builds_html_from_text() -> None:
    from browser.fake_service import PAGES

    for file in PAGES.glob("*.js"):
        text = file.read_text(encoding="utf-8")
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "DOMParser",
        ):
            assert word not in text, f"{file.name}: {word}"
