"""Studies: strategies side by side on one task, by several seeds, with the accuracy of their checkpoints.

`file` is what a person asks for, `plan` the trainings that follow from it, `session` runs what is missing of them,
`curves` compares them, `picture` and `report` show that.
"""
