-- Conceptual 12M (Changpinyo et al. 2021, section 2), as far as pictures and plain text tell.

-- rule min_side: both sides have more than 400 pixels
least(width, height) > 400;

-- rule aspect: the longer side is at most 2.5 times the shorter
greatest(width, height) <= 2.5 * least(width, height);

-- rule words: 3 to 256 words
len(regexp_extract_all(caption, '\S+')) BETWEEN 3 AND 256;

-- rule repetition: at most a fifth of the words repeat an earlier one
list_unique(regexp_extract_all(lower(caption), '\S+')) >= 0.8 * len(regexp_extract_all(caption, '\S+'));
