"""The map of hosts."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from browser.conftest import Visit
from browser.fake_run import run_id
from browser.fake_service import FakeServer


def _host(name: str) -> str:
    return f"[data-host={name}]"


def test_who_is_where_and_what_is_free(visit: Visit) -> None:
    page = visit("/hosts")
    page.sees("6 hosts, 21 of 36 slots used")
    first = page.text(_host("node1"))
    for part in ("Up", "load 37.2", "41", "gpt-small/warmup-2k", "launch of linus"):
        assert part in first
    assert len(page.all(f"{_host('node1')} .slot.free")) == 2
    assert len(page.all(f"{_host('node1')} .gpu.free")) == 2
    assert page.one(f"{_host('node1')} a.slot").get_attribute("href").endswith(f"/runs/{run_id(1)}")
    page.sees("GPU 2: 3 corrected memory errors since boot", _host("node3"))
    page.sees("Drained", _host("node4"))
    page.sees("no answer on port 22", _host("node5"))


def test_drain_asks_and_resume_does_not(visit: Visit, service: FakeServer) -> None:
    page = visit("/hosts")
    page.click("[data-action=drain-node1]")
    page.sees("Its jobs go on to their end", "dialog")
    page.button("Drain", "dialog").click()
    page.sees("Drained", _host("node1"))
    page.click("[data-action=resume-node1]")
    page.sees("Up", _host("node1"))
    assert [call[1] for call in service.state.calls] == ["hosts/node1/drain", "hosts/node1/resume"]


def test_hosts_are_added_and_removed(visit: Visit) -> None:
    page = visit("/hosts")
    page.click("#add-hosts")
    page.one("dialog input").send_keys("node7:4,node8\n")
    page.sees("hosts: node8: expected NAME:SLOTS", "#messages")
    page.click("#add-hosts")
    page.one("dialog input").send_keys("node9:4\n")
    page.sees("node9")
    page.click("[data-action=remove-node9]")
    page.button("Remove", "dialog").click()
    page.sees_not("node9")


def test_only_admins_have_buttons(visit: Visit) -> None:
    page = visit("/hosts", token="submit-token")
    page.sees("node1")
    assert not page.all(".host button") and not page.all("#add-hosts")


def test_a_host_that_goes_down_is_seen(visit: Visit, service: FakeServer) -> None:
    page = visit("/hosts")
    page.sees("Up", _host("node2"))
    service.state.hosts[1]["down"] = "ssh: no route to host"
    service.state.emit("hosts", {})
    page.sees("ssh: no route to host", _host("node2"))


def test_no_hosts_says_what_to_do(
    visit: Visit, another_service: Callable[..., AbstractContextManager[FakeServer]]
) -> None:
    for queue_on, command in ((True, "hvd-transformer hosts add"), (False, "hvd-transformer serve --hostfile")):
        with another_service(0, queue_on) as server:
            server.state.hosts.clear()
            page = visit("/hosts", server=server)
            page.sees(command)
            page.driver.get("about:blank")
