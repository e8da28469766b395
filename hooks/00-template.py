"""What this hook does, for node operators: one sentence here.

Then the facts that they must know: which containers, when, what the hook needs, what it cannot do. This hook
is a template and does nothing useful: the containers of pods with an annotation (``example.com/note: ...``)
get it as an environment variable.

Configured under the name of this file, without ``.py``::

    hooks:
      settings:
        00-template:
          timeout: 200ms              # how long one answer may take; also TIMEOUT below
          failurePolicy: Ignore       # Fail: a call is refused when this hook fails; also FAILURE_POLICY
          config:                     # the fields of Settings
            variable: NOTE
"""

from __future__ import annotations

from dataclasses import dataclass, field

from proxy.hooks.api import Adjustment, Configure, PreCreateContainer, Veto

# The version of the interface that this file is written for. It is required.
API_VERSION = 1

# Seconds that one answer may take, and what happens to a call when this hook fails ("Ignore" or "Fail"). Both
# are optional; the configuration of this hook takes precedence.
TIMEOUT = 0.2
FAILURE_POLICY = "Ignore"

# A file that only computes (no while, try or with, few imports) costs half as much if it sets PURE = True.
# Its calls may then be repeated.
PURE = False


# The settings of the hook, with defaults. The daemon checks the configuration against this class before the
# hook is used. Leave the class out if there is nothing to configure.
@dataclass(frozen=True)
class Settings:
    """The settings of this hook."""

    annotation: str = field(
        default="example.com/note", metadata={"help": "The pod's annotation that is handed on."}
    )
    variable: str = field(default="NOTE", metadata={"help": "Name of the variable."})
    longest: int = field(default=256, metadata={"help": "Longer notes are refused."})

    def __post_init__(self) -> None:
        """Check what the types cannot express: a ValueError is reported to the operator."""
        if self.longest < 1:
            raise ValueError("longest must be at least 1")


_settings = Settings()


def configure(event: Configure) -> None:
    """Take the settings; called once, before all other functions."""
    global _settings
    _settings = event.settings


# Each function that is named after a hook point is called there; "topoproxy hooks points" names all of them.
# "async def" works, too. Functions of your own may have any other name.
def pre_create_container(event: PreCreateContainer) -> Adjustment | Veto | None:
    """Pass the note on. Fields that an answer leaves out stay unchanged; None changes nothing."""
    note = event.pod.annotations.get(_settings.annotation)
    if note is None or _settings.variable in event.container.envs:
        return None
    if len(note) > _settings.longest:
        return Veto(f"the annotation {_settings.annotation} is longer than {_settings.longest} characters")
    return Adjustment(envs={_settings.variable: note})
