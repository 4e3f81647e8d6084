-- ALIGN (Jia et al. 2021, section 3). Left out: its rule on rare words, which needs the counts of its own corpus.

-- rule min_side: the shorter side has more than 200 pixels
least(width, height) > 200;

-- rule aspect: the longer side is less than three times the shorter
greatest(width, height) < 3.0 * least(width, height);

-- rule texts_of_image: the picture comes with at most 1,000 texts
count(DISTINCT caption) OVER (PARTITION BY coalesce(sha256, url, uid)) <= 1000;

-- rule images_of_text: the text comes with at most 10 pictures
count(DISTINCT coalesce(sha256, url, uid)) OVER (PARTITION BY caption) <= 10;

-- rule words: three to twenty words
len(regexp_extract_all(caption, '\S+')) BETWEEN 3 AND 20;
