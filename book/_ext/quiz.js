// Quizzes: the first choice answers a question, reveals every explanation and is scored.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  const quizzes = [...document.querySelectorAll("fieldset.quiz")];
  const bar = document.querySelector(".quiz-score");
  if (!bar) return;
  const output = bar.querySelector("output");
  const options = (quiz) => [...quiz.querySelectorAll(".quiz-option")];

  const showScore = () => {
    const answered = quizzes.filter((quiz) => quiz.classList.contains("answered"));
    const correct = answered.filter((quiz) => quiz.querySelector('.chosen[data-right="true"]'));
    const total = quizzes.length;
    output.textContent = `Answered ${answered.length}/${total} · Correct ${correct.length}/${total}`;
  };

  const choose = (quiz, chosen) => {
    if (quiz.classList.contains("answered")) return;
    quiz.classList.add("answered");
    for (const option of options(quiz)) {
      const right = option.dataset.right === "true";
      const mine = option === chosen;
      option.classList.toggle("chosen", mine);
      const input = option.querySelector("input");
      input.checked = mine;
      input.setAttribute("aria-disabled", "true");
      const verdict = option.querySelector(".quiz-verdict");
      verdict.textContent = right ? "✓ right" : mine ? "✗ wrong" : "";
    }
    for (const details of quiz.querySelectorAll(".quiz-explanation")) details.open = true;
    showScore();
  };

  const reset = () => {
    for (const quiz of quizzes) {
      quiz.classList.remove("answered");
      for (const option of options(quiz)) {
        option.classList.remove("chosen");
        option.querySelector(".quiz-verdict").textContent = "";
        const input = option.querySelector("input");
        input.checked = false;
        input.removeAttribute("aria-disabled");
      }
      for (const details of quiz.querySelectorAll(".quiz-explanation")) details.open = false;
    }
    showScore();
  };

  for (const quiz of quizzes) {
    quiz.classList.add("with-script");
    const all = options(quiz);
    const inputs = all.map((option) => option.querySelector("input"));
    inputs.forEach((input, i) => {
      input.addEventListener("change", () => choose(quiz, all[i]));
      // Once answered, the choice stands.
      input.addEventListener("click", (event) => {
        if (quiz.classList.contains("answered") && !all[i].classList.contains("chosen")) event.preventDefault();
      });
      input.addEventListener("keydown", (event) => {
        // Arrow keys would choose, and so answer, each option on the way: here they only move.
        const step = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
        if (step) {
          event.preventDefault();
          inputs[(i + step + inputs.length) % inputs.length].focus();
        } else if (event.key === "Enter") {
          event.preventDefault();
          choose(quiz, all[i]);
        }
      });
    });
  }
  bar.querySelector("button").addEventListener("click", reset);
  bar.hidden = false;
});
