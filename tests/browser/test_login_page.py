"""Login by the link that the service prints, by the form, and logout."""

from browser.conftest import Visit
from browser.fake_service import FakeServer


def test_the_token_leaves_the_address_and_the_history(visit: Visit, service: FakeServer) -> None:
    page = visit("/hosts")
    page.sees("node1")
    assert page.driver.current_url == f"{service.url}/hosts"
    entries = page.driver.execute_cdp_cmd("Page.getNavigationHistory", {})["entries"]
    assert not any("token" in entry["url"] for entry in entries)
    stored = page.run("return JSON.stringify([localStorage, sessionStorage, document.cookie])")
    assert "admin-token" not in stored


def test_the_form_refuses_wrong_tokens_and_takes_a_right_one(visit: Visit) -> None:
    page = visit(token="")
    page.one("#token").send_keys("guessed\n")
    page.sees("this token is not valid")
    page.sees("hvd-transformer token add")
    page.one("#token").clear()
    page.one("#token").send_keys("view-token\n")
    page.sees("gpt-small/warmup-2k")
    page.sees("eve", "#account")


def test_a_wrong_link_says_so(visit: Visit) -> None:
    page = visit(token="guessed")
    page.sees("this token is not valid")
    assert "token" not in page.driver.current_url


def test_a_link_that_is_pasted_into_an_open_tab_logs_in(visit: Visit, service: FakeServer) -> None:
    """The browser loads nothing where only what follows the # differs."""
    page = visit(token="")
    page.one("#token")
    page.run(f"location.href = '{service.url}/#token=view-token'")
    page.sees("eve", "#account")
    assert "token" not in page.driver.current_url


def test_logout_and_the_end_of_a_session_lead_to_the_form(visit: Visit) -> None:
    page = visit()
    page.sees("gpt-small/warmup-2k")
    page.click("#account button")
    page.sees("may do everything", "#account-menu")
    page.click("#logout")
    page.one("#token").send_keys("submit-token\n")
    page.sees("gpt-small/warmup-2k")
    page.driver.delete_all_cookies()
    page.click("thead th:nth-child(3) button")
    page.one("#token")
