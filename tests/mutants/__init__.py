"""How strong the tests are: one place of the package is changed, and the tests that reach it must fail.

``python -m tests.mutants record FOLDER`` runs tests under coverage, which writes down what each reaches, and
``python -m tests.mutants run FOLDER`` draws places by a seed in all rooms, changes each in a copy of the repository and
runs the tests that reach it. What survives is either the same program or a hole in the tests.
``python -m tests.mutants reached FOLDER`` prints how much of each room the recorded tests reach, and what raises and is not
reached.
"""
