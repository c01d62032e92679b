"""The events of a federation beside its rounds: OUT/events.jsonl and the server's log.

An event names the client, its node, and the key that the node proved to hold.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.common.logger import log

from fedhb.files import as_json, write_atomically

EVENTS, STATUS = "events.jsonl", "status.json"


class Journal:
    """Writes the events of a run, and where it stands (OUT/status.json)."""

    def __init__(self, folder: Path | None):
        self.folder = folder
        self.events: list[dict[str, Any]] = []

    def note(self, event: str, detail: str, *, round_number: int = 0, **about: Any) -> None:
        """Write an event, with what is known of the client."""
        record = {
            "time": datetime.now(UTC).isoformat(),
            "event": event,
            "round": round_number,
            **about,
            "detail": detail,
        }
        self.events.append(record)
        self._append(record)
        named = ", ".join(f"{key} {v}" for key, v in about.items() if v not in (None, ""))
        log(WARNING, "round %s: %s (%s): %s", round_number, event, named, detail)

    def stand(self, state: str, detail: str = "") -> None:
        """Write where the run stands: waiting, training, evaluating, done or failed."""
        log(INFO, "%s%s", state, f": {detail}" if detail else "")
        if self.folder is not None:
            write_atomically(
                self.folder / STATUS,
                as_json({"state": state, "detail": detail, "pid": os.getpid()}),
            )

    def _append(self, record: dict[str, Any]) -> None:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / EVENTS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
