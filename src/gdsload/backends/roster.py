"""The lanes that lead to one device: found once, left for good when they fail, and what is to be
said of those that are not taken. Which of them a range takes is decided in `auto`.
"""

from __future__ import annotations

from typing import Any

from gdsload.backends import registry
from gdsload.backends.lanes import Lane

LAST = "posix"  # it needs nothing but CUDA
ORDER = ("gds_mt", LAST, "gds")  # of the house, where nothing was measured
_AFTER = {"gds": "gds_mt", "gds_mt": LAST}


class Roster:
    """Lanes by name. `refusals` tells why others are not among them, or were left."""

    def __init__(self, device: str, options: dict[str, Any]) -> None:
        """`options` are for those lanes that have them.

        Raises TypeError for an option that none has, ValueError for ``allow_compat``.
        """
        if options.get("allow_compat"):
            raise ValueError(
                "allow_compat=True: 'auto' never takes cuFile's compatibility mode; ask for"
                " backend='gds_mt' or 'gds' by name"
            )
        self._device, self._options = device, options
        self._refusals: dict[str, str] = {}
        self._searched = False
        self.lanes = {LAST: Lane(registry.built_in(LAST), self._of(LAST))}
        unknown = options.keys() - {key for name in ORDER for key in self._of(name)}
        if unknown:
            registry.built_in(LAST)(**{key: options[key] for key in unknown})

    def _of(self, name: str) -> dict[str, Any]:
        known = {option.name for option in registry.built_in(name).options()}
        return {key: value for key, value in self._options.items() if key in known}

    def search(self) -> None:
        """Finds the lanes besides the last one, once: cuFile is looked for, and not opened."""
        if self._searched:
            return
        self._searched = True
        wanted = []
        for name in ORDER:
            foreign = self._options.keys() - self._of(name).keys()
            if name == LAST:
                continue
            if foreign:
                self._refusals[name] = f"it has no option {', '.join(sorted(foreign))}"
            else:
                wanted.append(name)
        found, refusals = registry.usable(wanted, self._device)
        self._refusals.update(refusals)
        for kind in found:
            self.lanes[kind.name] = Lane(kind, self._of(kind.name))

    @property
    def refusals(self) -> dict[str, str]:
        """Why lanes are not taken, and what those that are have to do without."""
        found = dict(self._refusals)
        for lane in self.lanes.values():
            found.update(lane.refusals)
        return found

    def standing(self) -> list[str]:
        """Those that can be taken, in the order of the house."""
        return [name for name in ORDER if name in self.lanes and not self.lanes[name].out]

    def lane(self, name: str) -> Lane:
        """The lane of that name, or the next one that is still taken."""
        while name != LAST and (name not in self.lanes or self.lanes[name].out):
            name = _AFTER[name]
        return self.lanes[name]

    def after(self, lane: Lane) -> Lane:
        """The next lane for what failed on this one."""
        return self.lane(_AFTER[lane.name])

    def leave(self, lane: Lane, why: str) -> None:
        """It is not taken any more."""
        lane.out = why
        self._refusals[lane.name] = why

    def note(self, lane: Lane, of: str, what: str) -> None:
        """Something that a lane could not do, while it goes on."""
        self._refusals[f"{lane.name}/{of}"] = what
