"Mixture-of-experts models on a memory budget."

from importlib import import_module

__version__ = "0.1.0"
__all__ = ["Config", "ExpertFlow", "ExpertFlowError"]
_HOME = {"Config": "config", "ExpertFlow": "flow", "ExpertFlowError": "config"}


def __getattr__(name: str) -> object:
    # torch takes seconds to import: only when somebody asks for what needs it
    if name in _HOME:
        return getattr(import_module(f"expertflow.{_HOME[name]}"), name)
    raise AttributeError(f"module 'expertflow' has no attribute {name!r}")
