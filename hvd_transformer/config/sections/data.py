"""The keys of the section `data`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from hvd_transformer.config.sections.key import (
    OptionalCount,
    OptionalName,
    OptionalPositive,
    Section,
    changeable,
    fixed,
    none_word,
)

ClassWeights = Annotated[
    Literal["balanced"] | dict[str, Annotated[float, Field(gt=0)]] | None, BeforeValidator(none_word)
]
# `config.mixture` knows the keys.
Sources = Annotated[list[dict[str, float | str]] | None, Field(min_length=1), BeforeValidator(none_word)]
Fraction = Annotated[float, Field(ge=0, le=1)]

LEARNED_TOKENIZERS = ("basic_english", "char", "bpe")


class DataConfig(Section):
    """The data set, its tokenizer and its batches."""

    source: str = fixed(
        "python-docs",
        "a folder with train.txt, valid.txt and test.txt, or one text file; .jsonl or .parquet instead of .txt: a "
        "document per line or row, also in shards: train-*.parquet, train/*.jsonl.gz, or a pattern such as "
        "'shards/*.jsonl.zst'; token files of nanoGPT (train.bin) and Megatron (.bin, .idx); or python-docs "
        "(built in), wikitext2, wikitext103, penntreebank; for translation: multi30k, iwslt2016, wmt14, or a folder or "
        "file of sentence pairs; for classification: a folder or file of tables",
        min_length=1,
    )
    sources: Sources = fixed(
        None,
        "language_model: a mixture instead of source: a list of tables such as {source: a.jsonl, weight: 0.7, epochs: "
        "2}; weight: its share of the samples, relative to the others (by default each sample counts the same); epochs "
        "(1): how often an epoch reads it or, with weights, at most; text_column: its own. none: only source",
        allowed="none, or a list of tables such as [{source: a.jsonl, weight: 0.7}, {source: b.jsonl, weight: 0.3}]",
    )
    split: list[Fraction] = fixed(
        [0.9, 0.05, 0.05],
        "fractions for train, valid and test if source is one file or a pattern; two numbers: no test split",
        allowed="a list of two or three fractions from 0 to 1, such as [0.9, 0.05, 0.05]",
        min_length=2,
        max_length=3,
    )
    tokenizer: str = fixed(
        "bpe",
        "basic_english: words, by torchtext; char: characters; bpe: byte-pair encoding; for a language model also a "
        "Hugging Face tokenizer.json, or the folder with it, with a slash in its name (./my-model), a .tiktoken file, "
        "or a .model file of SentencePiece",
        allowed="basic_english, char, bpe, or a Hugging Face tokenizer.json or its folder, such as ./my-model, or a "
        ".tiktoken or .model file",
        pattern=r"^(basic_english|char|bpe|.*[/.].*)$",
    )
    vocab_size: OptionalCount = fixed(None, "maximum vocabulary size, including <unk>; none: all tokens (bpe: 4096)")
    min_frequency: int = fixed(1, "tokens that are rarer than this in the training split become <unk>", ge=1)
    tokenizer_sample_mb: OptionalPositive = fixed(
        1024.0,
        "bpe: learn from at most this many MiB of the training split, spread evenly over it; more brings nothing but "
        "time and memory; none: all of it",
    )
    batching: Literal["windows", "columns"] = fixed(
        "windows",
        "windows: fixed-length samples, shuffled by seed and epoch; columns: the text in batch_size columns, with "
        "a separate stretch of rows for each rank (as in the PyTorch tutorial)",
    )
    document_mask: bool = fixed(
        False,
        "with batching=windows of documents: no token attends to another document, and positions start anew at each",
    )
    sequence_length: int = fixed(
        128, "tokens per sample; if samples differ in length: of the longest sample, on either side", ge=1
    )
    target_length: OptionalCount = fixed(
        None,
        "translation: tokens of the longest target; sequence_length is then that of the longest source only. Also the "
        "limit of what `translate` writes; none: sequence_length, and translations of up to 2 x source + 10 tokens",
    )
    too_long: Literal["drop", "cut", "error"] = fixed(
        "drop",
        "if samples differ in length: drop and count those of more than sequence_length (or target_length) tokens, "
        "truncate them, or stop with an error",
    )
    batch_tokens: OptionalCount = changeable(
        None,
        "if samples differ in length: batches are filled up to this number of tokens, including padding, instead of "
        "batch_size samples; none: batch_size",
    )
    source_language: str = fixed(
        "de",
        "translation: source language, the extension of its files (train.de); its code in a model.pretrained of many "
        "languages",
        min_length=1,
    )
    target_language: str = fixed("en", "translation: target language, as source_language (train.en)", min_length=1)
    train: OptionalName = fixed(
        None, "file name of the training split if source is a folder, without the ending (.txt, .csv, …); none: train"
    )
    valid: OptionalName = fixed(
        None, "file name of the validation split, as for train; none: valid, val, validation or, of samples, dev"
    )
    test: OptionalName = fixed(
        None,
        "file name of the test split, as for train; none: test or, of pairs, the only name that starts with it; for "
        "translation also a test set that sacrebleu downloads, such as sacrebleu:wmt14",
    )
    text_column: str = fixed(
        "text", "column with the text: of a table, or of documents in JSON lines or Parquet", min_length=1
    )
    messages_column: OptionalName = fixed(
        None,
        "instruction tuning: column of JSON lines with conversations, lists of messages with role and content, such as "
        "messages; model.pretrained's chat template makes it text, and the loss is on the assistant's tokens; none: "
        "plain text",
    )
    label_column: str = fixed("label", "classification: column with the label", min_length=1)
    positive_label: OptionalName = fixed(
        None, "label for precision, recall and f1; default: the second label if there are two, otherwise none"
    )
    class_weights: ClassWeights = fixed(
        None,
        "weight of each class in the loss: a number per label, such as {good: 1, bad: 2.5}; balanced: inversely "
        "proportional to its frequency; none: equal weights",
        allowed="balanced, none, or a number above 0 for each label, such as {good: 1, bad: 2.5}",
    )
    cache_dir: str = changeable(
        "~/.cache/hvd-transformer/data",
        "cache folder for downloads, token files and measured layer times",
        min_length=1,
    )
    workers: int = changeable(0, "number of processes or threads that prepare the token files; 0: one per core", ge=0)

    def length_of(self, role: str) -> int:
        """The maximum number of tokens of a sample's text in this role, such as "source" and "target"."""
        return self.target_length or self.sequence_length if role == "target" else self.sequence_length
