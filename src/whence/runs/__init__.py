"""Run directories: typed, versioned files of one training run, each written atomically, no pickles."""

from whence.runs.checkpoints import TAG as TAG
from whence.runs.checkpoints import Checkpoint as Checkpoint
from whence.runs.checkpoints import CheckpointClock as CheckpointClock
from whence.runs.checkpoints import checkpoint_path as checkpoint_path
from whence.runs.checkpoints import choose_policy_interval as choose_policy_interval
from whence.runs.checkpoints import list_checkpoints as list_checkpoints
from whence.runs.checkpoints import load_tree as load_tree
from whence.runs.checkpoints import read_latest as read_latest
from whence.runs.checkpoints import save_tree as save_tree
from whence.runs.config_file import check_content as check_content
from whence.runs.config_file import find_content as find_content
from whence.runs.config_file import strip_addresses as strip_addresses
from whence.runs.directory import POLICIES_EVERY as POLICIES_EVERY
from whence.runs.directory import PerRound as PerRound
from whence.runs.directory import RunDirectory as RunDirectory
from whence.runs.directory import Table as Table
from whence.runs.files import CHANGED as CHANGED
from whence.runs.files import check_links as check_links
from whence.runs.files import parse_document as parse_document
from whence.runs.files import read_tensor_file as read_tensor_file
from whence.runs.locks import LOCK as LOCK
from whence.runs.locks import lock_directory as lock_directory
from whence.runs.stopwatch import Stopwatch as Stopwatch
from whence.runs.stopwatch import time_stage as time_stage
from whence.runs.writer import RunWriter as RunWriter
from whence.runs.writer import Seconds as Seconds
