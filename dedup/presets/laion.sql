-- LAION-400M (Schuhmann et al. 2021). The rule on CLIP scores applies where the pairs have a column clip_score.

-- rule bytes: the file has at least 5 KB
bytes >= 5000;

-- rule characters: at least five characters
length(caption) >= 5;

-- rule clip_score (if clip_score): the cosine of a ViT-B/32's embeddings is at least 0.30
clip_score >= 0.30;
