"""The keys of the section `translation`."""

from hvd_transformer.config.sections.key import Section, changeable


class TranslationConfig(Section):
    """Beam search, in evaluation and in `translate`."""

    beam: int = changeable(4, "beam size; 1: greedy search", ge=1)
    length_penalty: float = changeable(
        0.6, "length penalty; above 0 favours longer translations (Wu et al. 2016)", ge=0, le=10
    )
