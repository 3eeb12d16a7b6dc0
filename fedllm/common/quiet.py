"""Silences third-party libraries that print while a model or data set loads."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

from huggingface_hub.utils import logging as hub_logging
from transformers.utils import logging as transformers_logging


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences third-party logs, warnings and progress bars, and puts their settings back."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    hub_verbosity = hub_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    hub_logging.set_verbosity(logging.ERROR)
    try:
        # The GGUF reader's bar knows no setting: it is a bare tqdm, which writes to stderr.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
