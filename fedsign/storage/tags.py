"""Tags and a note of a run: `tags.json` in its folder, for people; nothing that a run computes depends on it."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from fedsign.errors import ConfigError, ResultsError
from fedsign.storage import digests
from fedsign.storage.results import RunFolder

FILE = "tags.json"
_TAG = re.compile(r"[^\W_][\w./:+-]{0,49}")
_LONGEST_NOTE = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Tags:
    """What a user wrote about a run.

    Raises:
        ConfigError: a tag or the note is not of the form that lists can show.
    """

    tags: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        for tag in self.tags:
            if not _TAG.fullmatch(tag):
                raise ConfigError(
                    f"the tag {tag!r} was given, but expected a word of at most 50 letters, digits, and ._/:+-, with a "
                    "letter or digit first."
                )
        if not self.note.isprintable() or len(self.note) > _LONGEST_NOTE:
            raise ConfigError(
                f"a note of {len(self.note):,} characters was given, but expected one line of at most "
                f"{_LONGEST_NOTE:,}; shorten it."
            )

    def with_changes(self, *, add: Iterable[str] = (), remove: Iterable[str] = (), note: str | None = None) -> "Tags":
        """Tags added and removed; a note replaces the former one.

        Raises:
            ConfigError: a tag to remove is not there.
        """
        removed = {*remove}
        if missing := sorted(removed - {*self.tags}):
            raise ConfigError(
                f"the tag '{missing[0]}' was to be removed, but the run has {', '.join(self.tags) or 'none'}."
            )
        tags = [tag for tag in dict.fromkeys([*self.tags, *add]) if tag not in removed]
        return Tags(tags=tuple(tags), note=self.note if note is None else note)


def read_tags(folder: RunFolder) -> Tags:
    """A run's tags and note; none without the file.

    Raises:
        ResultsError: the file is damaged.
    """
    path = folder.path / FILE
    if not path.exists():
        return Tags()
    try:
        content, _ = digests.read_json(path.read_text(encoding="utf-8"))
        return Tags(tags=tuple(_texts(content["tags"])), note=str(content["note"]))
    except (ConfigError, KeyError, OSError, TypeError, ValueError) as error:
        raise ResultsError(f"{path} is damaged ({error}); delete it, and tag the run again.") from error


def write_tags(folder: RunFolder, tags: Tags) -> None:
    """Write the file; remove it if there is nothing to say."""
    if tags == Tags():
        (folder.path / FILE).unlink(missing_ok=True)
    else:
        folder.write_json(FILE, asdict(tags))


def _texts(value: object) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise TypeError("its tags are no list of texts")
    return value
