"""Tuning speculation in the engines that people serve with, through the servers they come with.

`interface` says what a job asks of such an engine: one file for each, `vllm` the first. Our own
engine answers the same questions (`own`), so whatever is timed here is timed in one way. Over
HTTP there are no features, no forced text and no single rounds: acceptance comes from a server's
counters, and time from whole answers.
"""
