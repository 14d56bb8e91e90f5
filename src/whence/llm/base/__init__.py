"""The base of all trainers of language models: rows, views of models, processes, settings."""

from whence.llm.base.language_view import EXTRA_PADDING as EXTRA_PADDING
from whence.llm.base.language_view import language_view as language_view
from whence.llm.base.layer_rules import register_rmsnorm as register_rmsnorm
from whence.llm.base.ppo_config import PPOConfig as PPOConfig
from whence.llm.base.processes import ONE as ONE
from whence.llm.base.processes import Processes as Processes
from whence.llm.base.processes import check_copies as check_copies
from whence.llm.base.rows import TokenRows as TokenRows
from whence.llm.base.rows import list_infos as list_infos
from whence.llm.base.rows import list_tokens as list_tokens
from whence.llm.base.rows import make_rows as make_rows
from whence.llm.base.rows import make_table_rows as make_table_rows
from whence.llm.base.rows import pad_rows as pad_rows
from whence.llm.base.token_signals import average_rows as average_rows
from whence.llm.base.token_signals import list_signals as list_signals
from whence.llm.base.value_head import Reference as Reference
from whence.llm.base.value_head import WithValueHead as WithValueHead
from whence.llm.base.value_head import disable_dropout as disable_dropout
