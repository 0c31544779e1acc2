"""What a state is worth, how sure of it the critic is, and what a continuation will cost.

`head` is the ensemble, `posterior` the other source of uncertainty, `targets` and `losses` say
what is learned, `state` holds the evidence and the update, `calibration` judges the result.
"""
