"""Every error that the engine raises on purpose.

TicketEngineError
├── UserError             something the caller can put right: exit code 2
│   ├── SettingsError     a setting is outside what is allowed
│   ├── InputError        the tickets cannot be read, or a column is missing
│   ├── LabelsError       the labels file is not usable
│   ├── ModelError        the model cannot be loaded or cannot do this work
│   ├── HeadError         a fitted head does not fit this model, prompt or label set
│   ├── StoreError        stored scores are there and cannot be read
│   └── OutputError       the target cannot be written (busy, full, not a run's folder)
├── ScoringError          the model gave scores that are not finite
└── RefusedError          validation refused to publish: exit code 3

Messages say what was found, what is allowed and the way out, in one or two lines, with ids and
numbers and never with ticket text.
"""


class TicketEngineError(Exception):
    """Root of the engine's errors."""

    exit_code = 1


class UserError(TicketEngineError):
    """Something that the caller can put right."""

    exit_code = 2


class SettingsError(UserError):
    """A setting is outside what is allowed."""


class InputError(UserError):
    """The tickets cannot be read, or a needed column is missing or of the wrong type."""


class LabelsError(UserError):
    """The labels file is not usable."""


class ModelError(UserError):
    """The model cannot be loaded, or cannot do this work."""


class HeadError(UserError):
    """A fitted head does not belong to this model, prompt or label set."""


class StoreError(UserError):
    """Stored scores are there and cannot be read: a fault of the disk, the network or the system."""


class OutputError(UserError):
    """The target folder cannot be written, or is not one of ours."""


class ScoringError(TicketEngineError):
    """The model gave scores that are not finite."""


class RefusedError(TicketEngineError):
    """Validation refused to publish; the previous output is untouched."""

    exit_code = 3
