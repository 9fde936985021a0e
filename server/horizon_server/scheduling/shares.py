"""Who has used how much of the devices: device seconds by project and user, which count half after each half-life."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from horizon_server.records.sharing import Allowance, Holder, ShareUse

# A weight of 0 divides nothing; such a user is served when no other one waits.
LEAST_WEIGHT = 1e-6
# Less is not worth storing.
LEAST_USE_S = 1e-6


class Shares:
    """The decayed use of each project and user, and their weights.

    A use is kept as of the time of its last charge and decayed when it is read, so that a charge costs the same
    whatever the number of users. A clock that goes backwards decays nothing: a use is never read as of a time before
    its last charge.
    """

    def __init__(self, half_life_s: float, uses: Iterable[ShareUse] = (), allowances: Iterable[Allowance] = ()) -> None:
        assert half_life_s > 0, half_life_s
        self._half_life_s = half_life_s
        # By (project, user), and by (project, "") for the whole project: device seconds and the time that they are
        # decayed to.
        self._uses: dict[tuple[str, str], tuple[float, float]] = {}
        self._weights: dict[tuple[Holder, str], float] = {}
        for use in sorted(uses, key=lambda use: use.as_of_s):
            self.charge(use.project, use.user, use.device_s, use.as_of_s)
        self.set_allowances(allowances)

    def set_allowances(self, allowances: Iterable[Allowance]) -> None:
        """Replaces all weights; who has none weighs 1."""
        self._weights = {(one.holder, one.name): max(one.weight, LEAST_WEIGHT) for one in allowances}

    def charge(self, project: str, user: str, device_s: float, now_s: float) -> None:
        """Adds device seconds that were used up to now."""
        assert user and project
        for key in ((project, user), (project, "")):
            used_s, as_of_s = self._uses.get(key, (0.0, now_s))
            self._uses[key] = (used_s * self._left(now_s - as_of_s) + device_s, max(now_s, as_of_s))

    def raise_to(self, uses: Iterable[ShareUse]) -> None:
        """Count what was used elsewhere too: a use that is smaller here becomes as large as the given one."""
        for use in uses:
            here_s = self._use((use.project, use.user), use.as_of_s)
            if use.device_s > here_s:
                self.charge(use.project, use.user, use.device_s - here_s, use.as_of_s)

    def rank(self, project: str, user: str, now_s: float) -> tuple[float, float]:
        """Decayed use by weight of the project and of the user in it: the lowest is served first, and who has used
        nothing before all."""
        of_project = self._use((project, ""), now_s) / self.weight_of("project", project)
        return of_project, self._use((project, user), now_s) / self.weight_of("user", user)

    def use_of(self, project: str, user: str, now_s: float) -> float:
        """Decayed device seconds of a user in a project."""
        return self._use((project, user), now_s)

    def weight_of(self, holder: Holder, name: str) -> float:
        """The weight of a user or project, 1 where none was set."""
        return self._weights.get((holder, name), 1.0)

    def last_used_s(self, project: str, user: str) -> float:
        """When a user last used a device in a project (Unix seconds); 0 where never."""
        return self._uses.get((project, user), (0.0, 0.0))[1]

    def uses(self, now_s: float) -> list[ShareUse]:
        """All uses that are left by now, to be stored: each as of its last charge, so that nothing is lost in storing
        them."""
        return [
            ShareUse(project=project, user=user, device_s=device_s, as_of_s=as_of_s)
            for (project, user), (device_s, as_of_s) in sorted(self._uses.items())
            if user and self._use((project, user), now_s) > LEAST_USE_S
        ]

    def copy(self) -> Self:
        """The same uses and weights, to be charged without changing these."""
        other = type(self)(self._half_life_s)
        other._uses = dict(self._uses)
        other._weights = dict(self._weights)
        return other

    def _use(self, key: tuple[str, str], now_s: float) -> float:
        used_s, as_of_s = self._uses.get(key, (0.0, now_s))
        return used_s * self._left(now_s - as_of_s)

    def _left(self, elapsed_s: float) -> float:
        return 0.5 ** (elapsed_s / self._half_life_s) if elapsed_s > 0 else 1.0
