"""Attacks of another user, who makes our names first in a folder like /tmp: nothing is written through them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hvd_transformer.config import load
from hvd_transformer.data.build_once import build_once
from hvd_transformer.errors import UserError
from hvd_transformer.launch.launch_record import LaunchRecord
from hvd_transformer.own_folder import make_own_folder
from hvd_transformer.training.run_directory import RunDirectory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
OTHER = 54321


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """As /tmp is."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of ours, with a file."""
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "file").write_text("precious")
    return folder


def link(name: Path, victim: Path) -> None:
    name.symlink_to(victim)
    os.lchown(name, OTHER, OTHER)


def link_to_nothing(name: Path, victim: Path) -> None:
    link(name, victim / "new")


def own_folder(name: Path, victim: Path) -> None:
    name.mkdir()
    os.chown(name, OTHER, OTHER)
    name.chmod(0o777)


Attack = Callable[[Path, Path], None]
attacks = pytest.mark.parametrize("attack", [link, link_to_nothing, own_folder])


def built(folder: Path) -> str:
    def load_it(folder: Path) -> str | None:
        return (folder / "content").read_text() if (folder / "content").exists() else None

    return build_once(folder, load_it, lambda aside: (aside / "content").write_text("ours") and None)


def prepare(folder: Path) -> None:
    built(folder / "prepared" / "text")


def train(folder: Path) -> None:
    config = load("python-docs", overrides=[f"output_dir={folder}"])
    RunDirectory(config).claim(config, lambda line: None)


def train_on_another_host(folder: Path) -> None:
    config = load("python-docs", overrides=[f"output_dir={folder}"])
    RunDirectory(config).begin(config, rank=1, first_on_host=True)


def launch(folder: Path) -> None:
    LaunchRecord(folder, "name").claim(lambda line: None)


@attacks
@pytest.mark.parametrize("use", [prepare, built, train, train_on_another_host, launch])
def test_a_folder_that_another_user_made_is_refused(
    shared: Path, victim: Path, attack: Attack, use: Callable[[Path], None]
) -> None:
    attack(shared / "name", victim)
    before = [path.relative_to(shared) for path in shared.rglob("*")]
    with pytest.raises(UserError) as caught:
        use(shared / "name")
    assert f"{shared / 'name'} belongs to user {OTHER}, in a folder where everyone can write" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in victim.iterdir()] == ["file"]
    assert [path.relative_to(shared) for path in shared.rglob("*")] == before


@attacks
@pytest.mark.parametrize("name", ["x.lock", ".x.tmp"])
def test_the_files_beside_it_do_not_lead_elsewhere(shared: Path, victim: Path, attack: Attack, name: str) -> None:
    attack(shared / name, victim / "file" if attack is link else victim)
    try:
        assert built(shared / "x") == "ours"  # root may remove what is in the way
    except UserError as error:
        assert "\n" not in str(error)
    assert (victim / "file").read_text() == "precious"
    assert [path.name for path in victim.iterdir()] == ["file"]


def test_no_link_is_taken_for_the_lock_in_any_folder(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "x.lock").symlink_to(victim / "file")
    with pytest.raises(UserError, match="x.lock: is a symbolic link; remove it"):
        built(tmp_path / "x")
    assert (victim / "file").read_text() == "precious"


def test_who_is_faster_than_we_are_is_noticed(shared: Path, victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Path.mkdir

    def late(path: Path, *arguments: int, **options: bool) -> None:
        link(shared / "name", victim)
        make(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", late)
    with pytest.raises(UserError, match="belongs to user"):
        make_own_folder(shared / "name")


def test_links_of_our_own_lead_to_folders_of_our_own(shared: Path, victim: Path) -> None:
    (shared / "ours").symlink_to(victim)
    make_own_folder(shared / "ours" / "new")
    assert (victim / "new").is_dir()
    own_folder(shared / "theirs", victim)
    (victim / "there").symlink_to(shared / "theirs")
    with pytest.raises(UserError, match="theirs belongs to user"):
        make_own_folder(victim / "there" / "new")


def test_a_folder_of_ones_group_on_a_scratch_disk_is_used(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, group = os.getegid(), 4711
    monkeypatch.setattr(os, "getgroups", lambda: [first, group])
    project = shared / "project"
    project.mkdir()
    os.chown(project, OTHER, group)
    project.chmod(0o2770)
    assert built(project / "cache" / "x") == "ours"
    project.chmod(0o2777)
    with pytest.raises(UserError, match="project belongs to user"):
        built(project / "cache" / "y")
    for other in (OTHER, first):  # everybody may be in the first group
        os.chown(project, OTHER, other)
        project.chmod(0o2770)
        with pytest.raises(UserError, match="project belongs to user"):
            built(project / "cache" / "y")


def test_users_who_share_a_folder_share_what_is_in_it(tmp_path: Path) -> None:
    """Its rights are for those who work together, unlike those of /tmp."""
    group = tmp_path / "group"
    group.mkdir(mode=0o770)
    own_folder(group / "cache", group)
    assert built(group / "cache" / "x") == "ours"
