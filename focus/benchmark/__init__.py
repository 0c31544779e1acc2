"""Speed of updating, scoring and decoding, beside other libraries on the same work.

work      what is done: dense rows, or rollouts of agents with branches
sides     ours, Hugging Face transformers, tunix: each does that work in its own way
compare   processes that take turns, agreement of their results, ratios, a report
"""
