-- DataComp's CLIP filtering (Gadre et al. 2023, section 3.4): the best 30 % by the score of a ViT-L/14.
-- `pairmill score --checkpoint C` makes the column; the share is of the pairs that have a score.

-- rule clip_score: the score is among the highest 30 %
clip_score >= quantile_cont(clip_score, 0.7) OVER ();
