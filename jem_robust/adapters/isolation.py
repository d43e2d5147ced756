"""Running somebody else's code without its traces: global random numbers, tracing and logging as they were before."""

import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

QUIET_LOGGERS = ("art", "auto-attack")
TOOLKIT_CODE = r"(art|foolbox|eagerpy|torchattacks|autoattack|pyautoattack)(\.|$)"


def argument_of(function: Callable[..., Any], name: str) -> Any:
    """The argument `name` of the call of `function` that is running now, None outside of one.

    For what a toolkit does to images before it shows them to the model, which is where it has to be refused.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals.get(name)


@contextmanager
def isolated(seed: int) -> Iterator[None]:
    """Seed torch's, numpy's and Python's global random numbers within the block and restore all of it afterwards.

    Undone as well: sys.settrace (AutoAttack's check_dynamic ends any debugger's or coverage's trace), handlers of the
    root logger (Foolbox 3.3.4 calls logging.info, which installs one). Not shown: warnings that ART and AutoAttack log
    about success rates, which our own verdict replaces, and Python warnings about the toolkits' own code, which the
    caller cannot act on.
    """
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    numpy_state, python_state, trace = np.random.get_state(), random.getstate(), sys.gettrace()
    handlers = logging.root.handlers[:]
    levels = {name: logging.getLogger(name).level for name in QUIET_LOGGERS}
    try:
        with torch.random.fork_rng(devices=devices), _seeded_random_states(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=TOOLKIT_CODE)
            # Foolbox 3.3.4's SpatialAttack; the warning names a line of torch.
            warnings.filterwarnings("ignore", message="torch.meshgrid: in an upcoming release")
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
            for name in QUIET_LOGGERS:
                logging.getLogger(name).setLevel(logging.ERROR)
            yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        sys.settrace(trace)
        logging.root.handlers[:] = handlers
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def _seeded_random_states() -> Iterator[None]:
    """np.random.RandomState() takes its seed from the global stream.

    ART 1.20.1 makes such states in BoundaryAttack, HopSkipJump and BrendelBethgeAttack, seeded by the operating system,
    so that nothing a caller does makes these attacks repeatable.
    """
    original = np.random.RandomState

    class Kind(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    class SeededRandomState(original, metaclass=Kind):  # type: ignore[misc, valid-type]
        def __init__(self, seed: Any = None) -> None:
            super().__init__(np.random.randint(2**31) if seed is None else seed)

    np.random.RandomState = SeededRandomState  # type: ignore[misc]
    try:
        yield
    finally:
        np.random.RandomState = original  # type: ignore[misc]
