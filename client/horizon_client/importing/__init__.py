"""A job file made from the config of another tool: Axolotl, LLaMA-Factory, TRL, or TrainingArguments of Hugging Face.

Every line of the config is accounted for: carried over, changed (with the arithmetic), to be checked, without effect
here, or not carried over. Nothing is guessed in silence. What the names mean is in `horizon_formats.other_names`; what
needs more than another name is in `conversion`.
"""

from horizon_client.importing.conversion import convert
from horizon_client.importing.imported import Imported, Line, Outcome
from horizon_client.importing.tools import TOOLS, read_config, tool_of

__all__ = ["TOOLS", "Imported", "Line", "Outcome", "convert", "read_config", "tool_of"]
