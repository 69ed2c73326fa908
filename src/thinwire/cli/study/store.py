"""Results as JSON, a file a task and method: what is there is not done again."""

from __future__ import annotations

import json
import os
from pathlib import Path

from thinwire.cli.study.methods import METHODS, Setting
from thinwire.cli.study.runs import Result
from thinwire.cli.study.tasks import Task


class Store:
    """The results of one method on one task.

    Results of a task or a method that has been defined otherwise since are not looked at, and overwritten.

    Args:
        directory: of all results.
        task: which.
        method: which.
        data: the fingerprint of the task's data; None to read results of any data, and to add none.
    """

    def __init__(self, directory: Path, task: Task, method: str, data: str | None) -> None:
        self.path = directory / task.name / f"{method}.json"
        self._definition = {"task": task.definition(), "method": METHODS[method].definition(), "data": data}
        self.results: list[Result] = []
        if self.path.exists():
            stored = json.loads(self.path.read_text(encoding="utf-8"))
            seen = stored["definition"] if data is not None else {**stored["definition"], "data": None}
            if seen == self._definition:
                self.results = [Result.from_json(each) for each in stored["runs"]]

    def find(self, setting: Setting, seed: int) -> Result | None:
        """A result that is there already."""
        return next((r for r in self.results if r.setting == setting and r.seed == seed), None)

    def add(self, result: Result) -> None:
        """Keep a result. A reader sees the old file or the new one."""
        assert self._definition["data"] is not None, "results belong to data"
        self.results.append(result)
        lines = ",\n".join(f"  {json.dumps(each.to_json(), allow_nan=False)}" for each in self.results)
        text = f'{{"definition": {json.dumps(self._definition)},\n "runs": [\n{lines}\n]}}\n'
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(f".{os.getpid()}")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.path)
