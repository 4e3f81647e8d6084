-- COYO-700M (Byeon et al. 2022), the rules on files, sizes and texts.

-- rule bytes: the file has at least 5 KB
bytes >= 5000;

-- rule min_side: the shorter side has at least 200 pixels
least(width, height) >= 200;

-- rule aspect: the longer side is at most three times the shorter
greatest(width, height) <= 3.0 * least(width, height);

-- rule characters: 6 to 1,000 characters
length(caption) BETWEEN 6 AND 1000;

-- rule words: 3 to 256 words
len(regexp_extract_all(caption, '\S+')) BETWEEN 3 AND 256;

-- rule repeats: the text occurs at most ten times
count(*) OVER (PARTITION BY caption) <= 10;
