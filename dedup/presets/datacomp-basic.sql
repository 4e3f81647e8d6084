-- DataComp's basic filtering (Gadre et al. 2023, appendix F): English captions of some length, pictures of some size.

-- rule english: the caption is English
lang = 'en';

-- rule words: more than two words
len(regexp_extract_all(caption, '\S+')) > 2;

-- rule characters: more than five characters
length(caption) > 5;

-- rule min_side: the shorter side has at least 200 pixels
least(width, height) >= 200;

-- rule aspect: the longer side is at most three times the shorter
greatest(width, height) <= 3.0 * least(width, height);
