"""Calls of cases.py on the plain-torch references: outputs and gradients, and bad calls that are refused."""


def test_every_case_has_outputs_and_gradients(references):
    assert len(references["cases"]) > 10
    for case, found in references["cases"].items():
        assert "output 0" in found and None not in found.values(), case


def test_fused_attention_refuses_every_bad_call(references):
    assert len(references["bad"]) == 2
    assert [name for name, found in references["bad"].items() if not str(found["ours"]).startswith("ConfigError")] == []
