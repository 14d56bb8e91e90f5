"""Texts: prompts and demonstrations, generated responses, rewards."""

from whence.llm.text.generation import Evaluate as Evaluate
from whence.llm.text.generation import Responses as Responses
from whence.llm.text.generation import answer_prompts as answer_prompts
from whence.llm.text.generation import generate as generate
from whence.llm.text.generation import list_vocabulary as list_vocabulary
from whence.llm.text.generation import split_text as split_text
from whence.llm.text.generation import write_evaluation as write_evaluation
from whence.llm.text.prompts import Prompt as Prompt
from whence.llm.text.prompts import Prompts as Prompts
from whence.llm.text.prompts import check_tokenizer as check_tokenizer
from whence.llm.text.prompts import context_length as context_length
from whence.llm.text.prompts import encode_demonstrations as encode_demonstrations
from whence.llm.text.prompts import encode_pair as encode_pair
from whence.llm.text.prompts import join_messages as join_messages
from whence.llm.text.prompts import list_chats as list_chats
from whence.llm.text.prompts import list_columns as list_columns
from whence.llm.text.prompts import read_chat as read_chat
from whence.llm.text.prompts import read_prompts as read_prompts
from whence.llm.text.rewards import NO_COLUMNS as NO_COLUMNS
from whence.llm.text.rewards import Columns as Columns
from whence.llm.text.rewards import Reward as Reward
from whence.llm.text.rewards import classifier as classifier
from whence.llm.text.rewards import compute_rewards as compute_rewards
from whence.llm.text.rewards import find_columns as find_columns
