"""Finished measurements beside the profile that is to be, so that a run that was killed goes on where it was."""

import dataclasses
from pathlib import Path

from megatron.oases.command_line import check_output
from megatron.oases.cost.profile_file import SECTIONS, Fingerprint
from megatron.oases.cost.records import first_difference, from_json, read_json_object, to_json, write_json_object
from megatron.oases.errors import UsageError

_VERSION = 2


class Partial:
    """The file `PROFILE.partial`: the fingerprint of the run, and what each finished measurement gave.

    Args:
        output: the profile that is to be.
        fingerprint: of this run.
        restart: whether to begin anew.

    Raises:
        UsageError: the profile is there already, or the partial file belongs to another run.
    """

    def __init__(self, output: Path, fingerprint: Fingerprint, *, restart: bool):
        check_output("--output", output, replaces=True)
        self.path = output.with_name(f"{output.name}.partial")
        self._fingerprint = fingerprint
        self.finished: dict[str, dict] = {}
        if output.exists() and not restart:
            raise UsageError(f"--output {output} is there already; add --restart to replace it")
        if self.path.exists() and not restart:
            self._read()
        self._write()

    def add(self, name: str, result: dict) -> None:
        self.finished[name] = result
        self._write()

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        write_json_object(
            self.path, {"version": _VERSION, "fingerprint": to_json(self._fingerprint), "finished": self.finished}
        )

    def _read(self) -> None:
        data = read_json_object(self.path, version=_VERSION)
        theirs = from_json(Fingerprint, data.get("fingerprint"), f"{self.path}: fingerprint")
        for part in (field.name for field in dataclasses.fields(Fingerprint)):
            difference = first_difference(getattr(theirs, part), getattr(self._fingerprint, part))
            if difference is not None:
                raise UsageError(
                    f"{self.path} is of another run: its {part}'s {difference}; add --restart to begin anew"
                )
        finished = from_json(dict[str, dict], data.get("finished"), f"{self.path}: finished")
        for name, result in finished.items():
            for section, entries in result.items():
                where = f"{self.path}: finished: {name}: {section}"
                if section not in SECTIONS:
                    raise UsageError(f"{where} is unknown; there are {', '.join(SECTIONS)}")
                from_json(tuple[SECTIONS[section], ...], entries, where)
        self.finished = finished
