from rbm.utils.suggestions import did_you_mean


def test_only_a_similar_name_is_suggested():
    known = {"rbm": 1, "mlp": 2, "ensemble": 3}
    assert did_you_mean("rmb", known) == "; did you mean 'rbm'?"
    assert did_you_mean("ensembles", known) == "; did you mean 'ensemble'?"
    assert did_you_mean("gat", known) == ""
