"""Where users say: FedSign replaces and removes what it wrote itself, and refuses the rest."""

import json
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fedsign.errors import ResultsError
from fedsign.storage.digests import sealed_json
from fedsign.storage.owned import MARK, check_writable, write_owned, writing


def write(folder: Path, product: str = "export", **texts: str) -> None:
    with writing(folder, product) as staged:
        for name, text in texts.items():
            path = staged / name.replace("__", "/").replace("_", ".")
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file() and path.name != MARK
    }


def test_a_second_write_leaves_nothing_of_the_first_and_all_of_others(tmp_path: Path) -> None:
    folder = tmp_path / "paper"
    write(folder, "analysis", valley_json="v")
    (folder / "main.tex").write_text("mine")
    write(folder, a="1", figures__old_pdf="1", b="1")
    write(folder, a="2", c="2")
    assert contents(folder) == {"a": "2", "c": "2", "main.tex": "mine", "valley.json": "v"}
    assert {path.name for path in folder.iterdir()} == {"a", "c", "main.tex", "valley.json", MARK}  # no empty folder
    write(folder, "analysis", valley_json="w", a="3")  # a file passes on to the product that wrote it last
    write(folder, c="4")
    assert contents(folder) == {"a": "3", "c": "4", "main.tex": "mine", "valley.json": "w"}


def test_a_file_that_was_deleted_or_holds_the_same_bytes_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("same")
    write(tmp_path, a="1", b="same")
    (tmp_path / "a").unlink()
    write(tmp_path, b="2")
    assert contents(tmp_path) == {"b": "2"}


def linked(path: Path) -> None:
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


OCCUPIED: dict[str, Callable[[Path], object]] = {
    "changed": lambda folder: (folder / "b").write_text("mine"),
    "changed and stale": lambda folder: (folder / "old").write_text("mine"),
    "not ours": lambda folder: (folder / "new").write_text("mine"),
    "a folder": lambda folder: (folder / "new").mkdir(),
    "a link to the same bytes": lambda folder: linked(folder / "b"),
    "a link to nothing": lambda folder: (folder / "new").symlink_to(folder / "nowhere"),
    "a linked folder": lambda folder: (folder / "figures").symlink_to(folder.parent),
    "a file where a folder is wanted": lambda folder: (folder / "figures").write_text("mine"),
    "a damaged mark": lambda folder: (folder / MARK).write_text((folder / MARK).read_text().replace("old", "odd")),
    "a mark of the user's": lambda folder: (folder / MARK).write_text("[1]"),
    "a mark of a later version": lambda folder: (folder / MARK).write_text(sealed_json({"format": 2, "products": {}})),
    "a mark that names files elsewhere": lambda folder: (folder / MARK).write_text(
        sealed_json({"format": 1, "products": {"export": {"../outside": ["0" * 32]}}})
    ),
}


@pytest.mark.parametrize("case", OCCUPIED)
def test_what_is_the_users_is_refused_by_name_and_nothing_changes(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write(folder, b="1", old="1")
    OCCUPIED[case](folder)
    before = contents(tmp_path), (folder / MARK).read_bytes(), sorted(folder.iterdir())
    named = r"out/(b|old|new|figures|\.fedsign\.json) .*; .*give another path\."
    with pytest.raises(ResultsError, match=named) as raised:
        write(folder, b="2", new="2", figures__a="2")
    assert (contents(tmp_path), (folder / MARK).read_bytes(), sorted(folder.iterdir())) == before
    assert raised.value.exit_code == 2


def test_a_check_before_the_computing_refuses_what_the_write_would(tmp_path: Path) -> None:
    write_owned(tmp_path / "a.svg", lambda path: path.write_text("1"))
    (tmp_path / "notes.md").write_text("mine")
    check_writable(tmp_path, "a.svg", "b.svg")
    check_writable(tmp_path / "new" / "folder", "*")
    (tmp_path / "a.svg").write_text("edited")
    with pytest.raises(ResultsError, match=r"a\.svg was changed since FedSign wrote it; move it away"):
        check_writable(tmp_path, "*.svg")
    with pytest.raises(ResultsError, match=r"notes\.md is not FedSign's"):
        check_writable(tmp_path, "notes*")
    for inside in (tmp_path / "notes.md", tmp_path / "notes.md" / "deeper"):
        with pytest.raises(ResultsError, match=r"notes\.md is a file; give a folder"):
            check_writable(inside)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ResultsError, match=r"dangling is a file; give a folder"):
        check_writable(tmp_path / "dangling")


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "out", a="1")
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    for folder in (tmp_path / "out", tmp_path / "new"):
        with pytest.raises(ZeroDivisionError), writing(folder, "export") as staged:
            (staged / "a").write_text("2")
            raise ZeroDivisionError
    assert {path: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert not (tmp_path / "new").exists()


def test_a_home_is_expanded_and_a_linked_folder_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(Path("~/out"), a="1")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    write(tmp_path / "link", b="2")
    assert contents(tmp_path / "out") == {"b": "2"}


def test_writers_at_once_take_turns(tmp_path: Path) -> None:
    """In processes of their own and in threads, the mark lists what each wrote."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: write(tmp_path, f"product {number % 4}", **{f"file{number % 4}": "1"}), range(16)))
    assert contents(tmp_path) == {f"file{number}": "1" for number in range(4)}
    products = json.loads((tmp_path / MARK).read_text())["products"]
    assert {name: [*files] for name, files in products.items()} == {f"product {n}": [f"file{n}"] for n in range(4)}


def killed(folder: Path, moment: int) -> None:
    """Write, and die at the given change of the disk, as SIGKILL does: without cleaning up."""
    left = moment

    def counted(call: Callable[..., None]) -> Callable[..., None]:
        def wrapper(*given: Any, **named: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                os._exit(9)
            call(*given, **named)

        return wrapper

    for name in ("replace", "unlink", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))
    write(folder, kept="new", new__file="new")
    os._exit(0)


def test_a_kill_at_any_moment_leaves_each_file_old_or_new_and_the_next_write_goes_through(tmp_path: Path) -> None:
    outcomes = set()
    for moment in range(40):
        folder = tmp_path / str(moment)
        write(folder, kept="old", stale="old")
        process = multiprocessing.get_context("fork").Process(target=killed, args=(folder, moment))
        process.start()
        process.join()
        files = {name: text for name, text in contents(folder).items() if ".partial" not in name}
        outcomes.add(tuple(sorted(files.items())))
        assert set(files.values()) <= {"old", "new"} and files.keys() <= {"kept", "stale", "new/file"}
        write(folder, kept="newer")
        assert contents(folder) == {"kept": "newer"}
        assert {path.name for path in folder.iterdir()} == {"kept", MARK}
        if process.exitcode == 0:
            break
        assert process.exitcode == 9
    assert process.exitcode == 0 and len(outcomes) >= 4  # before, between, and after the renames
