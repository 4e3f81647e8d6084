-- OBELICS (Laurencon et al. 2023, appendix A), its rules on single pictures, and four words as for its texts.

-- rule sides: each side has 150 to 20,000 pixels
least(width, height) >= 150 AND greatest(width, height) <= 20000;

-- rule aspect: the longer side is at most twice the shorter
greatest(width, height) <= 2.0 * least(width, height);

-- rule url: the URL does not speak of furniture of a page
NOT regexp_matches(lower(coalesce(url, '')), 'logo|button|icon|plugin|widget');

-- rule words: at least four words
len(regexp_extract_all(caption, '\S+')) >= 4;
