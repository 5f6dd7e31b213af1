// <ppo-explorer>: looks up what Python computed for a grid point and swaps SVG attributes.
"use strict";
(() => {
  // Every explorer on a page brings this script along; the first copy that runs serves them all.
  const startAll = () => document.querySelectorAll("ppo-explorer").forEach((explorer) => explorer.start());
  if (customElements.get("ppo-explorer")) {
    startAll();
    return;
  }

  const decode = ({ shape, steps }) => {
    const values = new Int32Array(shape.reduce((size, n) => size * n, 1));
    let sum = 0;
    let at = 0;
    for (const step of steps) {
      if (typeof step === "string") values.fill(sum, at, (at += Number(step))); // a run of zeros
      else values[at++] = sum += step;
    }
    return { shape, values };
  };

  // Row-major place of a grid point; an axis of length 1 does not depend on its slider.
  const offset = (shape, index) =>
    index.reduce((place, i, axis) => place * shape[axis] + (shape[axis] === 1 ? 0 : i), 0);
  const pick = (array, index) => array.values[offset(array.shape, index)];

  const numberText = (whole, decimals) => {
    const digits = String(Math.abs(whole)).padStart(decimals + 1, "0");
    const point = digits.length - decimals;
    const body = decimals ? `${digits.slice(0, point)}.${digits.slice(point)}` : digits;
    return (whole < 0 ? "−" : "") + body;
  };

  const pathText = (x, y, index, closed) => {
    // The first axis runs over the points of the curve.
    const points = Array.from({ length: x.shape[0] }, (_, i) =>
      `${pick(x, [i, ...index]) / 10} ${pick(y, [i, ...index]) / 10}`);
    return `M${points.join("L")}${closed ? "Z" : ""}`;
  };

  const fragment = () => new URLSearchParams(location.hash.slice(1));

  class Explorer extends HTMLElement {
    connectedCallback() {
      this.start();
    }

    start() {
      // While the page is still being read, an element is connected before its content is there.
      const source = this.querySelector('script[type="application/json"]');
      if (!source || this.form) return;
      this.source = source;
      this.form = this.querySelector("form");
      this.inputs = [...this.form.querySelectorAll("input")];
      this.valueTexts = [...this.form.querySelectorAll("output")];
      this.outputs = [...this.querySelectorAll(".ppo-readout")];
      this.excerpts = [...this.querySelectorAll(".ppo-text")];
      this.said = this.querySelector(".ppo-said");
      this.form.hidden = false;
      this.form.addEventListener("submit", (event) => event.preventDefault());
      this.form.addEventListener("input", () => this.move());
      this.form.addEventListener("reset", (event) => {
        event.preventDefault();
        for (const input of this.inputs) input.value = input.defaultValue;
        this.move();
      });
      window.addEventListener("hashchange", () => this.restore());
      this.restore(true);
      // The page is painted first; the data waits until it is wanted, or nothing else is to do.
      (window.requestIdleCallback ?? setTimeout)(() => this.load());
    }

    load() {
      if (this.sliders) return;
      const data = JSON.parse(this.source.textContent);
      this.readouts = data.readouts;
      const element = (id) => this.querySelector(`[id="${id}"]`);
      this.curves = data.curves.map(([id, closed, x, y]) => [element(id), closed, decode(x), decode(y)]);
      this.moves = data.moves.map(([id, x, y]) => [element(id), decode(x), decode(y)]);
      this.widths = data.widths.map(([id, width]) => [element(id), decode(width)]);
      this.shown = data.shown.map(([id, there]) => [element(id), decode(there)]);
      this.texts = data.texts;
      this.numbers = Object.fromEntries(Object.entries(data.numbers).map(([k, v]) => [k, decode(v)]));
      this.sliders = data.sliders;
    }

    get index() {
      return this.inputs.map((input) => Number(input.value));
    }

    move() {
      this.update();
      clearTimeout(this.pending);
      // Once the hand rests: a screen reader speaks and the address follows.
      this.pending = setTimeout(() => {
        this.said.textContent = this.outputs
          .map((output, i) => `${this.readouts[i].label}: ${output.textContent}`)
          .join(". ");
        this.remember();
      }, 250);
    }

    update() {
      this.load();
      const index = this.index;
      const set = (target, name, value) => {
        if (target.getAttribute(name) !== value) target.setAttribute(name, value);
      };
      for (const [path, closed, x, y] of this.curves) set(path, "d", pathText(x, y, index, closed));
      for (const [target, x, y] of this.moves) {
        set(target, "transform", `translate(${pick(x, index) / 10} ${pick(y, index) / 10})`);
      }
      for (const [target, width] of this.widths) set(target, "stroke-width", String(pick(width, index) / 10));
      for (const [target, there] of this.shown) {
        if (pick(there, index)) target.removeAttribute("display");
        else set(target, "display", "none");
      }
      this.texts.forEach((text, i) => (this.excerpts[i].textContent = pick(text, index)));
      this.readouts.forEach(({ parts }, i) => {
        this.outputs[i].textContent = parts
          .map(([literal, name, decimals]) =>
            literal + (name ? numberText(pick(this.numbers[`${name}.${decimals}`], index), decimals) : ""))
          .join("");
      });
      this.sliders.forEach(({ texts }, i) => {
        this.valueTexts[i].textContent = texts[index[i]];
        set(this.inputs[i], "aria-valuetext", texts[index[i]]);
      });
    }

    // Only what differs from the default stands in the address: #lab-a.clip_range=0.1&…
    remember() {
      const state = fragment();
      this.sliders.forEach(({ name, values }, i) => {
        const { value, defaultValue } = this.inputs[i];
        if (value === defaultValue) state.delete(`${this.id}.${name}`);
        else state.set(`${this.id}.${name}`, values[value]);
      });
      for (const [key, value] of [...state]) if (!value) state.delete(key); // an ordinary anchor
      const text = state.toString();
      if (text !== fragment().toString()) history.replaceState(null, "", text ? `#${text}` : location.href.split("#")[0]);
    }

    restore(first = false) {
      const state = fragment();
      const keys = this.inputs.map(({ name }) => `${this.id}.${name}`);
      if (!keys.some((key) => state.has(key))) {
        if (first) {
          for (const input of this.inputs) input.value = input.defaultValue; // as it was drawn
          return;
        }
        // Back or an edited address may have taken the setting away; an anchor leaves it alone.
        if (location.hash.includes("=") || !location.hash) this.apply(this.inputs.map((input) => input.defaultValue));
        return;
      }
      this.load();
      this.apply(this.sliders.map(({ values }, i) => {
        const wanted = parseFloat(state.get(keys[i]));
        if (!Number.isFinite(wanted)) return this.inputs[i].defaultValue;
        const distance = values.map((value) => Math.abs(value - wanted));
        return String(distance.indexOf(Math.min(...distance)));
      }));
      this.scrollIntoView({ block: "start" });
    }

    apply(wanted) {
      this.inputs.forEach((input, i) => (input.value = wanted[i]));
      this.update();
    }
  }

  customElements.define("ppo-explorer", Explorer);
  startAll();
})();
