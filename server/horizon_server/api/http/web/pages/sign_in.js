/** The page of those who are not signed in. */
import { html, useRef, useState } from "../vendor/preact-htm.js";
import { signIn } from "../api.js";
import { useTitle } from "../parts.js";

export function SignIn({ why, onSignIn }) {
  const token = useRef(null);
  const [stay, setStay] = useState(false);
  useTitle("Sign in");
  const submit = (event) => {
    event.preventDefault();
    signIn(token.current.value.trim(), stay);
    onSignIn();
  };
  return html`
    <main class="sign-in" id="main">
      <form class="card" onSubmit=${submit}>
        <h1>
          <span class="sun" aria-hidden="true"></span>horizon
        </h1>
        <label for="token">Token</label>
        <input
          id="token"
          ref=${token}
          type="password"
          autocomplete="off"
          spellcheck=${false}
          required
          aria-describedby="token-help"
        />
        <p id="token-help" class="quiet">
          Ask whoever runs the node for one: <code>horizond token create YOU</code>
        </p>
        <label class="check">
          <input type="checkbox" checked=${stay} onChange=${(event) => setStay(event.target.checked)} /> Stay
          signed in on this browser
        </label>
        <p class="quiet">
          ${stay
            ? "The token is kept until you sign out. Do not choose this on a shared machine."
            : "The token is kept in this tab only, until it closes."}
        </p>
        <p class="bad" role="alert">${why}</p>
        <button type="submit" class="main">Sign in</button>
      </form>
    </main>
  `;
}
