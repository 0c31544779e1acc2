"""Run reports: one self-contained HTML page, from curves down to the text of every turn."""

from focus.report.comparison import build_comparison as build_comparison
from focus.report.html import build_report as build_report
from focus.report.record import read_run as read_run
from focus.report.record import record_trees as record_trees
from focus.report.record import write_branches as write_branches
from focus.report.record import write_trees as write_trees
from focus.report.transcripts import record_evaluation as record_evaluation
from focus.report.transcripts import write_evaluation as write_evaluation
