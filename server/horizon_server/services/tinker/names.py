"""Tinker's names of things: nothing is stored besides them, so that they mean the same after any restart.

SESSION                       what a program has opened: 16 digits, then 8 that say whose it is
SESSION:train:N               its N-th model, a horizon session whose job is named tinker-SESSION-N
tinker://MODEL/KIND/NAME      a checkpoint of it; its name in horizon is weights.NAME, sampler.NAME or external.NAME
SESSION:sample:N:TARGET       a sampling client; TARGET is what answers, in base64
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from dataclasses import dataclass
from typing import Literal

from horizon_server.errors import InvalidSpec, NotFound
from horizon_server.records.account import Principal
from horizon_server.spec import NAME_PATTERN

Kind = Literal["training", "sampler", "external"]

MAX_ID_CHARS = 512
"""Of an id that Tinker's API takes."""
MAX_NAME_CHARS = 54
"""Of the name of a checkpoint; with its kind before it, it is a name of horizon."""

_MODEL = re.compile(r"([0-9a-f]{24}):train:(0|[1-9][0-9]{0,5})")
_JOB = re.compile(r"tinker-([0-9a-f]{24})-(0|[1-9][0-9]{0,5})")
_SAMPLER = re.compile(r"([0-9a-f]{24}):sample:(0|[1-9][0-9]{0,8}):([A-Za-z0-9_=-]{4,400})")
_PATH = re.compile(r"tinker://([^/]{1,60})/(weights|sampler_weights|external_weights)/([^/]{1,63})")
_RANDOM_CHARS, _OWNER_CHARS = 16, 8
_SEGMENTS: dict[Kind, str] = {"training": "weights", "sampler": "sampler_weights", "external": "external_weights"}
_PREFIXES: dict[Kind, str] = {"training": "weights.", "sampler": "sampler.", "external": "external."}
UNNAMED = "unnamed."
"""Before the name of a checkpoint that was made for one sampling client."""


@dataclass(frozen=True, kw_only=True)
class ModelName:
    """A model of a session."""

    session: str
    number: int

    @classmethod
    def parse(cls, text: str) -> ModelName:
        """Raises NotFound for anything that is not the id of a model."""
        found = _MODEL.fullmatch(text)
        if found is None:
            raise no_model(text)
        return cls(session=found[1], number=int(found[2]))

    @classmethod
    def of_job(cls, name: str) -> ModelName | None:
        """Return the model that a job of that name is; None where it is another job."""
        found = _JOB.fullmatch(name)
        return None if found is None else cls(session=found[1], number=int(found[2]))

    @property
    def text(self) -> str:
        """Its id, as the SDK makes it too."""
        return f"{self.session}:train:{self.number}"

    @property
    def job_name(self) -> str:
        """The name of its job."""
        return f"{job_prefix(self.session)}{self.number}"


@dataclass(frozen=True, kw_only=True)
class CheckpointName:
    """A checkpoint of a model."""

    model: ModelName
    kind: Kind
    name: str

    @classmethod
    def parse(cls, path: str) -> CheckpointName:
        """Raises NotFound for anything that is not the path of a checkpoint."""
        found = _PATH.fullmatch(path)
        if found is None or _MODEL.fullmatch(found[1]) is None:
            raise no_checkpoint(path)
        kind = next(kind for kind, segment in _SEGMENTS.items() if segment == found[2])
        return cls(model=ModelName.parse(found[1]), kind=kind, name=found[3])

    @classmethod
    def of_name(cls, model: ModelName, name: str) -> CheckpointName | None:
        """Return the checkpoint that has this name in horizon; None where it is none of Tinker's."""
        for kind, prefix in _PREFIXES.items():
            if name.startswith(prefix) and len(name) > len(prefix):
                return cls(model=model, kind=kind, name=name.removeprefix(prefix))
        return None

    @property
    def path(self) -> str:
        """Its path, such as tinker://MODEL/weights/NAME."""
        return f"tinker://{self.model.text}/{self.checkpoint_id}"

    @property
    def checkpoint_id(self) -> str:
        """What the SDK calls its id."""
        return f"{_SEGMENTS[self.kind]}/{self.name}"

    @property
    def stored(self) -> str:
        """Its name in horizon."""
        return _PREFIXES[self.kind] + self.name


@dataclass(frozen=True, kw_only=True)
class Target:
    """What answers a sampling client: a base, a checkpoint of a model, or a model as it is (`step` None)."""

    base: str = ""
    model: str = ""
    step: int | None = None


def new_session(principal: Principal) -> str:
    """Return the id of a new session of the caller."""
    random = secrets.token_hex(_RANDOM_CHARS // 2)
    return random + _owner_digits(principal.name, random)


def require_own(principal: Principal, session: str) -> None:
    """Let pass the id of a session of the caller's own. Raises NotFound.

    It keeps programs apart and protects nothing: who may do what with a job is decided by its owner.
    """
    if re.fullmatch(r"[0-9a-f]{24}", session) is None or not is_of(principal.name, session):
        raise NotFound(f"session {session!r:.80} does not exist, or is not yours; create_session makes one")


def is_of(owner: str, session: str) -> bool:
    """Whether a session is one of that user's."""
    random, digits = session[:_RANDOM_CHARS], session[_RANDOM_CHARS:]
    return digits == _owner_digits(owner, random)


def job_prefix(session: str) -> str:
    """Return how the names of the jobs of a session's models begin."""
    return f"tinker-{session}-"


def sampler_id(session: str, number: int, target: Target) -> str:
    """Return the id of a sampling client. Raises InvalidSpec where the name of its base is too long."""
    step = "" if target.step is None else target.step
    text = f"b/{target.base}" if target.base else f"m/{target.model}/{step}"
    made = f"{session}:sample:{number}:{base64.urlsafe_b64encode(text.encode()).decode()}"
    if _SAMPLER.fullmatch(made) is None:
        raise InvalidSpec.of("base_model", "base_model is too long for a sampling client; push it under a name")
    return made


def target_of(principal: Principal, sampler: str) -> Target:
    """Return what answers a sampling client of the caller's. Raises NotFound."""
    absent = NotFound(f"sampling session {sampler!r:.80} does not exist, or is not yours")
    found = _SAMPLER.fullmatch(sampler)
    if found is None:
        raise absent
    try:
        require_own(principal, found[1])
        kind, _, rest = base64.urlsafe_b64decode(found[3]).decode().partition("/")
    except (NotFound, ValueError) as error:
        raise absent from error
    if kind == "b" and rest:
        return Target(base=rest)
    model, _, step = rest.partition("/")
    if kind != "m" or not (step.isdecimal() or not step) or len(step) > 18 or _MODEL.fullmatch(model) is None:
        raise absent
    return Target(model=model, step=int(step) if step else None)


def checkpoint_name(text: str | None) -> str:
    """Return the name that a checkpoint is to have. Raises InvalidSpec."""
    if text is None:
        raise InvalidSpec.of("path", "path is missing; it is the name of the checkpoint")
    if len(text) > MAX_NAME_CHARS or NAME_PATTERN.fullmatch(text) is None:
        raise InvalidSpec.of(
            "path",
            f"path is {text!r:.80}; it must be 1 to {MAX_NAME_CHARS} letters, digits, '.', '_' or '-', starting with a "
            "letter or digit",
        )
    return text


def no_model(text: str) -> NotFound:
    """Return the error of a model that does not exist, or that the caller may not see."""
    return NotFound(f"model {text!r:.80} does not exist, or is not yours")


def no_checkpoint(text: str) -> NotFound:
    """Return the error of a checkpoint that does not exist, or that the caller may not see."""
    return NotFound(f"checkpoint {text!r:.200} does not exist, or is not yours")


def _owner_digits(owner: str, random: str) -> str:
    return hashlib.sha256(f"{random}/{owner}".encode()).hexdigest()[:_OWNER_CHARS]
