"""Language: text data, tokenizers, decoders, models from `transformers`."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="text data, tokenizers, decoders, and models of `transformers`",
    modules=(
        "fedsign.data.text",
        "fedsign.metrics.answer_check",
        "fedsign.metrics.answer_keys",
        "fedsign.metrics.choices",
        "fedsign.metrics.exact_match",
        "fedsign.metrics.generated",
        "fedsign.metrics.greedy",
        "fedsign.metrics.perplexity",
        "fedsign.metrics.rouge",
        "fedsign.metrics.token_accuracy",
        "fedsign.models.causal_lm",
        "fedsign.models.causal_roles",
        "fedsign.models.gpt",
        "fedsign.models.hugging_face",
        "fedsign.tasks.documents",
        "fedsign.tasks.language",
        "simulations.language",
    ),
    rows={
        "dataset": {
            "jsonl": ("fedsign.data.text.jsonl:jsonl", "your instructions or conversations in a JSONL file"),
            "text_folder": ("fedsign.data.text.text_folder:text_folder", "your texts in a folder"),
            "pytext": ("fedsign.data.text.pytext:pytext", "English text that ships with Python, 79 documents"),
        },
        "model": {
            "gpt": ("fedsign.models.gpt:gpt", "decoder-only language model, GPT-2 to LLaMA"),
            "transformers": (
                "fedsign.models.causal_lm:causal_lm",
                "causal language model of `transformers`, from a folder or a config.json",
            ),
        },
        "task": {
            "language": ("fedsign.tasks.language:Language", "cross-entropy of the next token"),
        },
        "metric": {
            "perplexity": ("fedsign.metrics.perplexity:perplexity", "exp of the mean loss per token"),
            "token_accuracy": (
                "fedsign.metrics.token_accuracy:token_accuracy",
                "fraction of next tokens predicted correctly",
            ),
            "exact_match": (
                "fedsign.metrics.exact_match:exact_match",
                "fraction of generated answers that equal the reference, normalized as in SQuAD",
            ),
            "rouge_1": ("fedsign.metrics.rouge:rouge_1", "F1 of words in generated answers"),
            "rouge_2": ("fedsign.metrics.rouge:rouge_2", "F1 of pairs of words in generated answers"),
            "rouge_l": (
                "fedsign.metrics.rouge:rouge_l",
                "F1 of the longest common subsequence of words in generated answers",
            ),
            "acc": ("fedsign.metrics.choices:acc", "fraction of questions whose likeliest choice is right"),
            "acc_norm": (
                "fedsign.metrics.choices:acc_norm",
                "fraction of questions whose likeliest choice per byte is right",
            ),
        },
    },
    named_by={"jsonl": "path", "text_folder": "root"},
    moved={f"fedsign.data.{name}": f"fedsign.data.text.{name}" for name in ("jsonl", "pytext", "text_folder")},
    sections={"server": "fedsign.metrics.answer_keys:AnswerKeys"},
    extends={"run_check": "fedsign.metrics.answer_check:run_check"},
    commands={
        "export": "simulations.language.command:export",
    },
    files=(
        "docs/how-to/language-data.md",
        "docs/how-to/federated-llm.md",
    ),
)
