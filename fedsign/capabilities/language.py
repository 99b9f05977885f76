"""Language: text data, tokenizers, decoders, models from `transformers`."""

from fedsign.capability import Capability

CAPABILITY = Capability(
    purpose="text data, tokenizers, decoders, and models of `transformers`",
    modules=(
        "fedsign.data.text",
        "fedsign.metrics.perplexity",
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
        },
    },
    named_by={"jsonl": "path", "text_folder": "root"},
    moved={f"fedsign.data.{name}": f"fedsign.data.text.{name}" for name in ("jsonl", "pytext", "text_folder")},
    commands={
        "export": "simulations.language.command:export",
    },
    files=(
        "docs/how-to/language-data.md",
        "docs/how-to/federated-llm.md",
    ),
)
